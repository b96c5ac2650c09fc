"""Draws the packet rate of a device, and how long its packets are.

    python rate_plot.py [DEVICE [SECONDS [FILE.png]]]

The `# %%` lines make cells of it in Jupyter, VS Code and Spyder. Needs numpy; with matplotlib it
draws a picture, without it bars of text. For something to look at, start the daemon with a
generator: `vnplugd --source lab=gen,pps=50000,flows=100`, and use the device `host:lab`.
"""

# %% What to look at
import sys
import time

import numpy as np
import vnplug

DEVICE, SECONDS, FILE = (sys.argv[1:] + ["host:lab", "10", "rate.png"][len(sys.argv) - 1 :])[:3]
BIN_NS = 100_000_000

for device in vnplug.devices():
    print(f"{device.name:16} {device.kind:10} {device.state}")

# %% Capture: only times, lengths and flows are kept, so a few bytes of each packet do
times, lengths, flows = [], [], []
with vnplug.open(DEVICE, snaplen=64) as port:
    end = time.monotonic() + float(SECONDS)
    for batch in port.batches(timeout=0.1):
        # Columns are the batch's own memory: no copy, and they outlive it.
        times.append(np.asarray(batch.ts_ns))
        lengths.append(np.asarray(batch.wire_len))
        flows.append(np.asarray(batch.flow_hash))
        if time.monotonic() >= end:
            break
    stats = port.stats()

ts_ns, wire_len, flow = (np.concatenate(parts) for parts in (times, lengths, flows))
print(f"{len(ts_ns):,} packets of {len(np.unique(flow)):,} flows, {stats.lost:,} lost")
if not len(ts_ns):
    sys.exit("nothing came")

# %% Count: packets and bits per second, in steps of a tenth of a second; only whole steps
step = (ts_ns - ts_ns.min()) // BIN_NS
steps = max(int(step.max()), 1)
seconds = np.arange(steps) * BIN_NS / 1e9
packets = np.bincount(step, minlength=steps)[:steps] * (1e9 / BIN_NS)
bits = np.bincount(step, weights=wire_len, minlength=steps)[:steps] * (8e9 / BIN_NS)

# %% Draw
try:
    import matplotlib
except ImportError:
    for second, rate in zip(seconds, packets, strict=True):
        print(f"{second:6.1f} s {rate:12,.0f} packets/s {'#' * int(50 * rate / packets.max())}")
else:
    if __name__ == "__main__" and "ipykernel" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    top.fill_between(seconds, packets / 1e3, alpha=0.3)
    top.plot(seconds, packets / 1e3, label="packets")
    top.set(xlabel="seconds", ylabel="1000 packets/s", ylim=(0, None), title=DEVICE)
    right = top.twinx()
    right.plot(seconds, bits / 1e6, color="tab:orange", linestyle="--", label="bits")
    right.set(ylabel="Mbit/s", ylim=(0, None))
    top.legend(loc="lower left")
    right.legend(loc="lower right")
    bottom.hist(wire_len, bins=64)
    bottom.set(xlabel="bytes on the wire", ylabel="packets")
    bottom.set_title(f"{len(ts_ns):,} packets, {len(np.unique(flow)):,} flows, {stats.lost:,} lost")
    figure.savefig(FILE, dpi=120)
    print(f"{FILE} is written")
