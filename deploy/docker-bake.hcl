// Builds images for both architectures from the wheels that scripts/wheels made, so that nothing is
// compiled in an emulator: `docker buildx bake --file deploy/docker-bake.hcl` in the repository's root;
// --push pushes them to TAG.

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
