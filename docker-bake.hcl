// The images of both architectures, from wheels that scripts/wheels has made: nothing is compiled in an
// emulator. `docker buildx bake` builds them, with --push they go where TAG says.

variable "TAG" {
  default = "specops-api:latest"
}

variable "PYTHON_IMAGE" {
  default = "python:3.11-slim"
}

// Without -f, compose.yaml is read first, with a target for each of its services: this group is the
// one that counts.
group "default" {
  targets = ["image"]
}

target "image" {
  context    = "."
  dockerfile = "api/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = [TAG]
  args = {
    PYTHON_IMAGE = PYTHON_IMAGE
    WHEELS       = "dist"
  }
}
