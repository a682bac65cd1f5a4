#!/usr/bin/env python3
"""The corpus of a fuzz target as one file.

    tests/fuzz/corpus.py pack FOLDER FILE      all files of FOLDER, in order of their bytes, into FILE
    tests/fuzz/corpus.py unpack FILE FOLDER    each input of FILE into a file of its own in FOLDER

FILE is a row of inputs: each is its size, as a little-endian number of 4 bytes, and then its bytes.
Equal inputs are kept once. The names in FOLDER are libFuzzer's: the SHA-1 of the bytes.
"""

import hashlib
import pathlib
import struct
import sys


def pack(folder, file):
    inputs = sorted({path.read_bytes() for path in pathlib.Path(folder).iterdir()})
    packed = b"".join(struct.pack("<I", len(data)) + data for data in inputs)
    pathlib.Path(file).write_bytes(packed)
    return len(inputs)


def unpack(file, folder):
    packed = pathlib.Path(file).read_bytes()
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    at = count = 0
    while at < len(packed):
        (size,) = struct.unpack_from("<I", packed, at)
        data = packed[at + 4 : at + 4 + size]
        if len(data) != size:
            sys.exit(f"corpus: {file} ends inside an input")
        (pathlib.Path(folder) / hashlib.sha1(data).hexdigest()).write_bytes(data)
        at += 4 + size
        count += 1
    return count


if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack"):
    sys.exit(__doc__.strip())
print("corpus:", {"pack": pack, "unpack": unpack}[sys.argv[1]](*sys.argv[2:]), "inputs")
