"""Wire and storage types, as frozen structs without side effects.

Times are in seconds since the epoch (`_at`), durations in seconds (`_s`), sizes in bytes (`_bytes`),
fractions of an accelerator in thousandths (`_milli`).
"""
