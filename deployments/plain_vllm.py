"""`python -m deployments.plain_vllm ARGS`, the path that people write down."""

from deployments.command.plain_vllm import main

if __name__ == "__main__":
    main()
