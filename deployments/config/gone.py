"""Keys that have another name, or are gone: what an error says of them. docs/guides/upgrade.md has them as well."""

GONE = {
    "engine.prefill.scheduler": "prefill replicas go by engine.scheduler, in mode mixed and with admission slots",
}
