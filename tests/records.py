"""Records with chosen step times, as a measurement would make them."""

from gradwire.headroom import Machine, Record, Row, Workload


def record(world_size=2, num_samples=24, **step_ms):
    """Return a record whose rows vary by 1 % around the given step times."""
    rows = [
        Row(name, tuple(ms * (1 + 0.001 * (i % 11 - 5)) for i in range(num_samples)), 1_000_000)
        for name, ms in step_ms.items()
    ]
    return Record(
        gradwire_version="0.1.0",
        torch_version="2.13.0",
        date="2025-01-02T03:04:05+00:00",
        machine=Machine("A CPU", 2, "Linux"),
        world_size=world_size,
        threads_per_rank=1,
        backend="gloo",
        device="cpu",
        link=None,
        one_machine=True,
        interleaved=True,
        bucket_mb=None,
        workload=str(Workload()),
        num_parameters=Workload().num_parameters,
        gradient_bytes=4 * Workload().num_parameters,
        rows=tuple(rows),
    )
