"""Kinds of devices: what their data sheets say, and which shares of it work of this kind reaches.

| | source |
|---|---|
| A100, A800 | NVIDIA A100 80GB SXM data sheet (2021): 312 TFLOP/s, 2.039 TB/s, NVLink 600 GB/s; A800: NVLink 400 GB/s |
| H20 | press on NVIDIA's figures (2023): 148 TFLOP/s, 96 GB, 4.0 TB/s, NVLink 900 GB/s |
| H100, H800 | NVIDIA H100 SXM data sheet (2023): 989 TFLOP/s dense, 3.35 TB/s, NVLink 900 GB/s; H800: NVLink 400 GB/s |
| H200 | NVIDIA H200 SXM data sheet (2024): as H100, 141 GB, 4.8 TB/s |
| B200 | NVIDIA HGX B200 data sheet (2024), a GPU of eight: 2.25 PFLOP/s dense, 180 GB, 7.7 TB/s, NVLink 1.8 TB/s |

NVLink figures count both ways; the table has one. Between nodes a device has one 400 Gbit/s card (50 GB/s), A100 and A800 200 Gbit/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.auto.cost import PEAK_FLOPS

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One kind."""

    name: str
    flops: float
    """Dense bfloat16, a second."""
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To another device of the node, one way."""
    network_bytes_per_s: float
    """To another node, of one device."""
    host_bytes_per_s: float
    """To the host's memory, one way."""


def _device(name: str, tflops: float, gib: int, memory: float, link: float, network: float, host: float) -> DeviceType:
    """Memory in TB/s, links in GB/s."""
    return DeviceType(
        name=name,
        flops=tflops * 1e12,
        memory_bytes=gib * GIB,
        memory_bytes_per_s=memory * 1e12,
        link_bytes_per_s=link * 1e9,
        network_bytes_per_s=network * 1e9,
        host_bytes_per_s=host * 1e9,
    )


DEVICES = {
    device.name: device
    for device in (
        _device("A100", 312, 80, 2.039, 300, 25, 25),
        _device("A800", 312, 80, 2.039, 200, 25, 25),
        _device("H20", 148, 96, 4.0, 450, 50, 50),
        _device("H100", PEAK_FLOPS / 1e12, 80, 3.35, 450, 50, 50),
        _device("H800", 989, 80, 3.35, 200, 50, 50),
        _device("H200", 989, 141, 4.8, 450, 50, 50),
        _device("B200", 2250, 180, 7.7, 900, 50, 50),
    )
}
