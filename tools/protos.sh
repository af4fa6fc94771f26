#!/bin/sh
# Regenerates planaria/wire/control_pb2*.py(i) from control.proto. Commit the result: installing Planaria needs no
# compiler. control_pb2_grpc.pyi is written by hand (protoc makes no stubs for services); keep it in step.
#
# The compiler's version is pinned, in an environment of its own: generated code refuses runtimes older than its
# compiler, so the compiler must be as old as the lower bounds of grpcio and protobuf in pyproject.toml.
set -eu
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet "grpcio-tools==1.66.2" "setuptools<80"
"$venv/bin/python" -W ignore -m grpc_tools.protoc -I . \
    --python_out=. --pyi_out=. --grpc_python_out=. planaria/wire/control.proto
# protoc leaves the parameters of Mapping out, which mypy --strict refuses.
sed -i 's/_Mapping\]/_Mapping[str, object]]/g' planaria/wire/control_pb2.pyi
