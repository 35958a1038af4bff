"""A KV connector whose caches are on their way until a test says that they have come (tests.virtual_engine)."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput


class SlowConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side: every prompt is computed elsewhere. There is no worker."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def arrive(scheduler: Any, *request_ids: str) -> None:
    """Their caches have come."""
    scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=set(request_ids)))
