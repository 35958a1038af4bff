"""The routers: `router`."""

from pydantic import Field, IPvAnyNetwork

from deployments.config.scaling import RouterAutoscalingSection
from deployments.config.section import LiveKey, Seconds, Section
from router.terms import RoutedClientConfig


class RouterSection(Section):
    """The deployment that speaks HTTP."""

    replicas: int = Field(default=1, ge=1)
    """One front end handles about 13 000 tokens/s per core: several for each fast GPU."""
    autoscaling: RouterAutoscalingSection | None = None
    """In place of a fixed number of replicas."""
    num_cpus: float = Field(default=1, ge=0)
    """Cores that Ray reserves for each router."""
    max_ongoing_requests: int = Field(default=10_000, ge=1)
    """HTTP requests that one router replica handles at once; 1 000 more wait for it, beyond them it is 503 with
    Retry-After."""
    max_body_bytes: LiveKey[int | None] = Field(default=None, ge=1024)
    """Longer request bodies get 413. null goes by the model: 1 MiB, or 64 MiB where it takes images or sounds, and 32
    bytes for each token of its context."""
    max_buffered_bytes: LiveKey[int] = Field(default=512 << 20, ge=1 << 20)
    """Bodies of all requests that a router handles together. Beyond it the largest of those still on their way get
    503."""
    body_timeout_s: LiveKey[Seconds] = 30.0
    """The longest that a body may take to come; then it gets 408. HAProxy has the first 32 kB before a router: on
    clusters it takes SLUICE_BODY_TIMEOUT_MS, 30 s without."""
    max_engine_requests: LiveKey[int] = Field(default=256, ge=1)
    """Prompts, conversations or items of one HTTP request, times the answers to each. More get 400."""
    max_prompt_logprobs: LiveKey[int] = Field(default=1 << 14, ge=1)
    """Values that `prompt_logprobs` (or `echo` with `logprobs`) may ask for: tokens of the prompt, times one more than
    the logprobs of each. More get 400. vLLM's front end makes them while all streams of the router wait: a hundred
    thousand take about a second."""
    grammar_timeout_s: LiveKey[Seconds] = 5.0
    """The longest that a schema, regular expression or grammar may take to compile, in seconds of a core; then its
    request gets 400."""
    media_networks: list[IPvAnyNetwork] = []
    """Networks, as 10.1.0.0/16, from which images, audio and video that a request names by URL are fetched, besides
    public addresses. Other private, loopback and link-local addresses are refused, also after a redirect. Where routers
    reach the world by a proxy (HTTP_PROXY), its address must be in one of them; what it fetches is for itself to
    check."""
    max_wait_s: LiveKey[Seconds] = 600.0
    """The longest that a request may wait for a replica before it fails."""
    late_patience_s: LiveKey[Seconds] = 60.0
    """In routers and engines: a request that stands behind those in time, for it is late, has no target or fills idle
    capacity, and has waited for longer, is owed one start in ten."""
    silence_s: Seconds = 10.0
    """A replica or router of this configuration that says nothing for this long is taken for dead. A tenth of it is the
    heartbeat: how often they say that they live, and exchange what they have learned."""

    @property
    def heartbeat_s(self) -> float:
        return self.silence_s / 10  # nine lost or late ones in a row are no accident

    def build(self) -> RoutedClientConfig:
        return RoutedClientConfig(
            max_wait_s=self.max_wait_s,
            heartbeat_s=self.heartbeat_s,
            silence_s=self.silence_s,
        )
