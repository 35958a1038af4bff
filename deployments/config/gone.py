"""Keys that have another name, or are gone: what an error says of them. docs/guides/upgrade.md has them as well."""

GONE = {
    "engine.prefill.scheduler": "prefill replicas go by engine.scheduler, in mode mixed and with admission slots",
    "engine.prefill.connector": "NIXL moves KV caches",
    "engine.prefill.folder": "NIXL moves KV caches, and no files do",
    "engine.prefill.max_folder_bytes": "NIXL moves KV caches, and no files do",
}
