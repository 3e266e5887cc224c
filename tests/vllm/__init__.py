"""The connector in a real vLLM, on CPU: `make test-vllm`. Needs an environment of its own (`make venv-vllm`)."""
