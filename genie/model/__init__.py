"""The nouns that travel between processes, as frozen structs. No behaviour that touches the world.

Times are seconds since the epoch (`_at`), durations end in `_s`, sizes in `_bytes`, shares of an
accelerator in thousandths (`_milli`). Not for: settings (config.py) and live objects (cluster/).
"""
