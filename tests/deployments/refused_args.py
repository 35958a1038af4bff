"""Arguments of `vllm serve` that Sluice does not leave to `vllm_args`, and what its refusal says."""

REFUSED_ARGS = [
    (["--model", "other"], "model"),
    (["--served-model-name=x"], "served_model_name"),
    (["--served_model_name", "x"], "served_model_name"),
    (["--max-model-len", "8", "--port", "1"], "HTTP options"),
    (["--host=0.0.0.0"], "HTTP options"),
    (["--api-server-count", "4"], "router.replicas"),
    (["--api-key", "k"], "keys"),
    (["--data-parallel-size", "2"], "engine.replicas"),
    (["-tp", "2", "-dp=2"], "engine.replicas"),
    (["--ssl-keyfile", "key.pem"], "--ssl-keyfile is of vLLM's own server"),
    (["--ssl_certfile=cert.pem"], "TLS goes in front"),
    (["--max-model-len", "8", "--enable-ssl-refresh"], "own server"),
    (["--uds", "/tmp/socket"], "own server"),
    (["--headless"], "own server"),
    (["--otlp-traces-endpoint", "http://collector:4317"], "--otlp-traces-endpoint needs vLLM's own statistics"),
    (["--collect-detailed-traces=all"], "which routers do not have"),
    (["--enable-per-request-metrics"], "Server-Timing"),
    (["--max_num_queued_tokens", "9"], "max_waiting and when_late"),
]
