#!/bin/sh
# Regenerates planaria/wire/control_pb2*.py(i) from control.proto. Run from the repository root, in an environment
# with the development extras (grpcio-tools), and commit the result: installing Planaria needs no compiler.
# control_pb2_grpc.pyi is written by hand (protoc makes no stubs for services); keep it in step with the service.
set -eu
cd "$(dirname "$0")/.."
"${PYTHON:-python}" -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. planaria/wire/control.proto
# protoc leaves the parameters of Mapping out, which mypy --strict refuses.
sed -i 's/_Mapping\]/_Mapping[str, object]]/g' planaria/wire/control_pb2.pyi
