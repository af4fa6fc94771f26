"""The coordinator: a thin asyncio and gRPC shell around ``planaria.core.quorum``, and what operators see of
it."""
