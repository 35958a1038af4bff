"""The Transformers engine measured from inside: prefill by layout, throughput by bins, packed decode."""
