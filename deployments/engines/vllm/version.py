"""By which routers and engine replicas know that they understand each other."""

import vllm

ENGINE_VERSION = f"vllm-{vllm.__version__}"
