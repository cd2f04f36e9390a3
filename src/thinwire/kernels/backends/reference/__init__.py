"""What every kernel means, in plain PyTorch. Native kernels equal these to the bit; CUDA tensors run on them.

Blocks: a buffer `x` holds S stretches, `starts` (int64[S + 1], in CPU memory) says where each begins. Each
stretch is cut into blocks of `block` elements (the last may be shorter; block = 0 means the whole stretch is
one block). Per-block arrays are in order. Codes are packed little-endian, `bits` bits each, and every block
begins on a whole byte.

Randomness: the draw of an element is a function of its stretch's key and of its counter, which is
`counters[stretch]` plus the element's place in the stretch.
"""
