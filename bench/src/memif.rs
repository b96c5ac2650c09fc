//! The peer: DPDK's memif between two `dpdk-testpmd`.

use crate::dpdk::{Socket, Testpmd, WorkerCpu, patiently};
use crate::row::{Plan, Result};

/// The peer's name in the table.
pub(crate) const NAME: &str = "DPDK memif (testpmd)";
/// What exactly the peer does.
pub(crate) const NOTE: &str = "memif: client testpmd txonly (writes the packet's headers into an \
     mbuf from its cache), the driver copies the mbuf into the shared ring, server's driver copies \
     it out into an mbuf, testpmd rxonly frees it; burst 64, buffers 1600 B, ring 1024 (4096 above \
     60 B): the best of bursts 16 to 128, rings 128 to 16384, buffers 1536 to 2048; zero-copy gave \
     no more.";

/// Packets received per microsecond over this many interfaces between the same two processes.
pub(crate) fn measure(plan: &Plan, len: usize, interfaces: usize) -> Result<f64> {
    patiently(|| attempt(plan, len, interfaces))
}

fn attempt(plan: &Plan, len: usize, interfaces: usize) -> Result<f64> {
    let socket = Socket::new("memif");
    // NB: log2 of the ring, the faster one: 60 B 27 Mpps (12: 26), 1514 B 11.8 Mpps (10: 9.1).
    let ring = if len <= 60 { 10 } else { 12 };
    let devices = |role| -> Vec<String> {
        let device = |id| {
            format!(
                "--vdev=net_memif{id},role={role},socket={socket},socket-abstract=no,bsize=1600,\
                 rsize={ring},id={id}"
            )
        };
        (0..interfaces).map(device).collect()
    };
    let mut server = Testpmd::start(
        WorkerCpu::First,
        &devices("server"),
        &["--forward-mode=rxonly"],
    )?;
    socket.awaited()?;
    let sending = ["--forward-mode=txonly", &format!("--txpkts={len}")];
    let _client = Testpmd::start(WorkerCpu::Second, &devices("client"), &sending)?;
    server.received(plan, interfaces)
}
