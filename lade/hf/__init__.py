"""The boundary to transformers: entry points, and the assembly of one call.

Options, stop criteria, streamers, results, and the return to plain decoding live here, but no
algorithm: the decoding loop is `lade.decoder`.
"""
