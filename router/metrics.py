"""What a router counts. Prefix `sluice_`, times in seconds, one registry for each router process."""

from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from policies.router.sessions import Sessions
from policies.router.tiers import Load
from router.exposition import page
from router.key_metrics import KeyMetrics

_WAIT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_ERROR_BUCKETS_S = (-60, -30, -10, -5, -2.5, -1, -0.5, -0.1, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def _values(counter: Counter, **labels: str) -> Iterator[float]:
    """Values of all series that have these labels."""
    for family in counter.collect():
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                yield sample.value


class ClassMetrics:
    """One class's children of the labelled metrics: looking a label up costs as much as counting, on every token."""

    def __init__(self, metrics: "RouterMetrics", slo_class: str) -> None:
        self.queue_wait_s = metrics.queue_wait_s.labels(slo_class)
        self.ttft_s = metrics.ttft_s.labels(slo_class)
        self.itl_s = metrics.itl_s.labels(slo_class)
        self.longest_wait_s = metrics.longest_wait_s.labels(slo_class)
        self.e2e_s = metrics.e2e_s.labels(slo_class)
        self.promise_gap_s = metrics.promise_gap_s.labels(slo_class)
        self.foreseen_ttft_s = metrics.foreseen_ttft_s.labels(slo_class)
        self.ttft_error_s = metrics.ttft_error_s.labels(slo_class)
        self.prompt_tokens = metrics.prompt_tokens.labels(slo_class)
        self.output_tokens = metrics.output_tokens.labels(slo_class)


class RouterMetrics:
    """Counters and histograms of one router process.

    `pool` keeps those of a pool of replicas besides the one that answers apart, by their prefix. All samples get
    `labels`. `process` is the page of what its process counts besides, where this registry speaks for it.
    """

    def __init__(
        self, pool: str = "", labels: Mapping[str, str] | None = None, process: Callable[[], bytes] = bytes
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels, self._process = labels or {}, process
        self._namespace = f"sluice_{pool}" if pool else "sluice"
        self._of_class: dict[str, ClassMetrics] = {}
        self.keys = KeyMetrics(self._namespace, self._labels)
        self._declare_requests()
        self._declare_promises()
        self._declare_prefixes()
        self._declare_router()

    def _declare_requests(self) -> None:
        """What became of requests, how long it took, how many tokens they had."""
        self.requests = self._counter(
            "requests",
            "Requests ended, by outcome: stop, length, repetition, cancelled (their client left, or asked a server of "
            "others for what cannot be), error, refused.",
            "slo_class",
            "bin",
            "outcome",
        )
        self.queue_wait_s = self._histogram("queue_wait_seconds", "From arrival to a replica's slot.", _WAIT_BUCKETS_S)
        self.longest_wait_s = self._gauge(
            "waiting_max_seconds", "How long the one has waited for a replica that waits longest now.", "slo_class"
        )
        self.ttft_s = self._histogram("ttft_seconds", "From arrival to the first token.", _WAIT_BUCKETS_S)
        self.itl_s = self._histogram("itl_seconds", "Gaps between successive tokens of a request.", _ITL_BUCKETS_S)
        self.e2e_s = self._histogram("e2e_seconds", "From arrival to the last token.", _WAIT_BUCKETS_S)
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens of ended requests that a replica was given, those in its cache included.",
            "slo_class",
        )
        self.output_tokens = self._counter("output_tokens", "Tokens generated.", "slo_class")
        self.predictor_fallbacks = self._counter(
            "predictor_fallbacks", "Requests classified without a prediction.", "slo_class"
        )
        self.shadow_starts = self._counter(
            "shadow_starts",
            "In shadow mode: requests started at their turn (same), or while the plan had another first (later).",
            "slo_class",
            "plan",
        )
        self.recovered = self._counter(
            "requests_recovered", "Requests moved off a lost replica: queued again, resumed or replayed.", "way"
        )
        self.recalled = self._counter(
            "requests_recalled", "Running requests that gave their slots to more urgent ones.", "slo_class"
        )

    def _declare_promises(self) -> None:
        """What was promised to requests, whether it was kept and why not, and what was predicted of them."""
        self.slo_requests = self._counter(
            "slo_requests",
            "Requests by what was promised: first token, mean time per further token and last token, met or missed. "
            "Refused and failed ones missed all three; those whose client left do not count.",
            "slo_class",
            "ttft",
            "tpot",
            "e2e",
        )
        self.refused = self._counter(
            "refused_requests", "Requests refused: late, max_waiting, max_key_share, quota.", "slo_class", "reason"
        )
        self.unkept = self._counter(
            "unkept_requests",
            "Requests whose promise was not kept, by why: refused (late, max_waiting, max_key_share, quota), or late: "
            "failed, moved, recalled, foreseen, preparing, queue, reading, pace, length.",
            "slo_class",
            "cause",
        )
        self.foreseen_ttft_s = self._counter(
            "foreseen_ttft_seconds",
            "From the queue to the first token, of requests for which it was predicted.",
            "slo_class",
        )
        self.ttft_error_s = self._counter(
            "ttft_error_seconds", "By how much those missed their prediction, either way.", "slo_class"
        )
        self.retry_error_s = self._histogram(
            "retry_after_error_seconds",
            "By how much later than told there was room for requests refused as late; below 0 it came sooner.",
            _ERROR_BUCKETS_S,
        )
        self.promise_gap_s = self._histogram(
            "promise_gap_seconds",
            "Mean time per token after the first, by request, of whole answers that were promised one.",
            _ITL_BUCKETS_S,
        )

    def _declare_prefixes(self) -> None:
        """What requests were taken to find in their replicas' caches, and what they found."""
        self.predicted_hit_tokens = self._counter(
            "predicted_hit_tokens",
            "Prompt tokens that the replica was taken to have cached to which their request went.",
            "slo_class",
            "replica",
        )
        self.hit_tokens = self._counter(
            "hit_tokens", "Prompt tokens that their replica had cached, by its engine's own count.", "slo_class"
        )
        self.loaded_tokens = self._counter(
            "loaded_tokens",
            "Of the prompt tokens that a replica had cached, those that its engine loaded, by the tier where a router "
            "knew them (unknown: it did not).",
            "slo_class",
            "tier",
        )
        self.wrong_hit_tokens = self._counter(
            "wrong_hit_tokens",
            "Prompt tokens taken for cached that were not (missing), or that were cached all the same (unforeseen).",
            "slo_class",
            "way",
        )
        self.prefix_entries = Gauge(
            "prefix_entries",
            "(replica, block) pairs that a router remembers of the prompts that it sent.",
            namespace=self._namespace,
            registry=self.registry,
        )

        self.sessions = self._gauge(
            "sessions", "Sessions that this router knows: all that paused for less than an hour."
        )
        self.session_pause_s = self._gauge("session_pause_seconds", "Median of the pauses of all sessions.")
        self.session_growth = self._gauge("session_growth_tokens", "By which a turn's prompt is longer than the last.")

    def note_sessions(self, sessions: Sessions) -> None:
        self.sessions.set(len(sessions))
        self.session_pause_s.set(sessions.pauses.median_s or 0.0)
        self.session_growth.set(sessions.growth_tokens)

    def note_hits(self, slo_class: str, predicted_tokens: int, hit_tokens: int) -> None:
        """What a request was taken to find in its replica's cache, and what it found."""
        self.hit_tokens.labels(slo_class).inc(hit_tokens)
        way = "missing" if predicted_tokens > hit_tokens else "unforeseen"
        self.wrong_hit_tokens.labels(slo_class, way).inc(abs(predicted_tokens - hit_tokens))

    def note_loads(self, slo_class: str, load: Load, loaded_tokens: int) -> None:
        """What a request was taken to load, and how much was loaded: the nearest tiers first."""
        for part in load.parts:
            tokens = min(part.tokens, loaded_tokens)
            self.loaded_tokens.labels(slo_class, part.tier).inc(tokens)
            loaded_tokens -= tokens
        if loaded_tokens:
            self.loaded_tokens.labels(slo_class, "unknown").inc(loaded_tokens)

    @property
    def loads(self) -> dict[str, int]:
        """Prompt tokens of all classes together that were loaded, by tier."""
        tokens = Tally[str]()
        for family in self.loaded_tokens.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    tokens[sample.labels["tier"]] += round(sample.value)
        return dict(sorted(tokens.items()))

    @property
    def hits(self) -> dict[str, int]:
        """Prompt tokens of all classes together: predicted, found, and what was mistaken of them."""
        counts = {"predicted": self.predicted_hit_tokens, "found": self.hit_tokens}
        totals = {name: sum(_values(counter)) for name, counter in counts.items()}
        ways = ("missing", "unforeseen")
        wrong = {way: sum(_values(self.wrong_hit_tokens, way=way)) for way in ways}
        return {name: round(tokens) for name, tokens in (totals | wrong).items()}

    def forget_replica(self, replica_id: str) -> None:
        """A replica is gone: what counts by replica goes with it."""
        self.predicted_hit_tokens.remove_by_labels({"replica": replica_id})

    def _declare_router(self) -> None:
        """How this process itself fares."""
        self.replicas_lost = self._counter(
            "replicas_lost", "Replicas whose connection broke, but for those that had drained."
        )
        self.out_of_reach = self._counter("replicas_out_of_reach", "Attempts to connect to a replica that failed.")
        self.loop_lag_s = Histogram(
            "event_loop_lag_seconds",
            "How long this router's event loop, and with it every stream, stood still; looked at 20 times a second.",
            namespace=self._namespace,
            registry=self.registry,
            buckets=_LAG_BUCKETS_S,
        )
        self.core_wait_s = self._counter(
            "event_loop_core_wait_seconds",
            "For how long this router's event loop was ready to run and had no core, as the system counts it.",
        )
        self.cached_blocks = self._gauge(
            "cached_blocks", "Blocks in the replicas' prefix caches that this router knows, as their engines tell it."
        )
        self.cached_blocks_bytes = self._gauge("cached_blocks_bytes", "Memory of those.")
        self.block_changes = self._counter("cached_block_changes", "Blocks that engines told as added or removed.")
        self.block_gaps = self._counter(
            "cached_block_gaps", "Changes of a prefix cache that were missed, so that it was asked for as a whole."
        )
        self.responses_unstored = self._counter(
            "responses_unstored",
            "Responses that could not be stored: no room for them or their conversation (room), Redis away (redis).",
            "why",
        )
        self.task_failures = self._counter("background_failures", "Background tasks that failed, by name.", "task")

    @property
    def loop_lag(self) -> tuple[float, float]:
        """Looks at the event loop so far, and the seconds of lag of all of them."""
        samples = {
            sample.name.rpartition("_")[2]: sample.value for sample in next(iter(self.loop_lag_s.collect())).samples
        }
        return samples["count"], samples["sum"]

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, namespace=self._namespace, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(name, help_text, labels, namespace=self._namespace, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("slo_class",)
        return Histogram(name, help_text, labels, namespace=self._namespace, registry=self.registry, buckets=buckets)

    def of(self, slo_class: str) -> ClassMetrics:
        found = self._of_class.get(slo_class)
        if found is None:
            found = self._of_class[slo_class] = ClassMetrics(self, slo_class)
        return found

    def missed(self, all_but: Collection[str]) -> int:
        """Requests of other classes than these whose promise was missed."""
        (family,) = self.slo_requests.collect()
        labels = ((each.labels, each.value) for each in family.samples if each.name.endswith("_total"))
        return int(sum(count for of, count in labels if "missed" in of.values() and of["slo_class"] not in all_but))

    def note_waits(self, longest_s: Mapping[str, float]) -> None:
        """By class; of one that is not there nothing waits."""
        for slo_class, metrics in self._of_class.items():
            metrics.longest_wait_s.set(longest_s.get(slo_class, 0.0))

    def note_build(self, versions: Mapping[str, str]) -> None:
        """Once: of what this router runs on, by name."""
        build = Info(
            "build", "Versions of what this router runs on.", namespace=self._namespace, registry=self.registry
        )
        build.info(dict(versions))

    def note_retry(self, slo_class: str, later_s: float) -> None:
        self.retry_error_s.labels(slo_class).observe(later_s)

    def exposition(self) -> bytes:
        return page(self.registry, self._labels) + self.keys.page() + self._process()


class SplitMetrics:
    """What a router counts where prefill and decode may be on different replicas, in the registry that it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, labels, namespace="sluice", registry=registry)

        self.decisions = counter("split_decisions", "Requests split (why=split), or why not.", "why")
        self.kv_transfers = counter(
            "kv_transfers", "Requests that a decode replica got with the KV cache of their prompt."
        )
        self.fallbacks = counter(
            "kv_transfer_fallbacks",
            "Split requests read by their decode replica all the same: late, refused, failed, expired, stalled.",
            "reason",
        )
        self.bucket_requests = counter("prefill_bucket_requests", "Prompts for prefill replicas, by bucket.", "bucket")
        self.prefill_tokens = counter("prefill_tokens", "Prompt tokens read by prefill replicas.")
        self.padding_tokens = counter(
            "prefill_padding_tokens", "Tokens of padding that a kernel which pads would have added to those."
        )
        self.prefill_s = Histogram(
            "prefill_seconds",
            "From a prompt's queueing for a prefill replica to its KV cache.",
            namespace="sluice",
            registry=registry,
            buckets=_WAIT_BUCKETS_S,
        )
