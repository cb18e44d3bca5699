// The images of both architectures, from wheels that scripts/wheels has made: nothing is compiled in an
// emulator. `docker buildx bake --file deploy/docker-bake.hcl` in the root of the repository builds them;
// with --push they go where TAG says.

variable "TAG" {
  default = "specops-api:latest"
}

variable "PYTHON_IMAGE" {
  default = "python:3.11-slim"
}

target "default" {
  context    = "."
  dockerfile = "api/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = [TAG]
  args = {
    PYTHON_IMAGE = PYTHON_IMAGE
    WHEELS       = "dist"
  }
}
