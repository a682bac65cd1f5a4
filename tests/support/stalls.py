"""Prints when this machine stood still for more than 50 ms, and for how many ms, until it is ended.

A process that only sleeps is run at once when it is due, unless there is no processor for anybody.
Each line: the time of day at the end of the stall, in whole seconds, and its length.
"""

import math
import time

STEP_S = 0.01
STALL_S = 0.05

while True:
    begin = time.monotonic()
    time.sleep(STEP_S)
    late = time.monotonic() - begin - STEP_S
    if late > STALL_S:
        print(math.ceil(time.time()), round(late * 1000), flush=True)
