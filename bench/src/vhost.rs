//! The peer: DPDK's vhost-user and virtio-user between two `dpdk-testpmd`.

use crate::dpdk::{Socket, Testpmd, WorkerCpu, patiently};
use crate::row::{Plan, Result};

/// The peer's name in the table.
pub(crate) const NAME: &str = "DPDK vhost-user (testpmd)";
/// What exactly the peer does.
pub(crate) const NOTE: &str = "vhost-user: the host's side (net_vhost) is testpmd txonly, whose driver \
     copies each mbuf into the guest's buffers; the guest's side (virtio-user, packed ring of 1024, in \
     order, no mergeable buffers, vectorized) is testpmd rxonly, which gets them without another copy; \
     burst 64: the fastest of rings of 256 and 1024, split and packed, with and without mergeable \
     buffers. The other way round, guest to host, is faster by about a third.";

/// Packets received per microsecond from the host's side by the guest's, over this many interfaces
/// between the same two processes.
pub(crate) fn measure(plan: &Plan, len: usize, interfaces: usize) -> Result<f64> {
    patiently(|| attempt(plan, len, interfaces))
}

fn attempt(plan: &Plan, len: usize, interfaces: usize) -> Result<f64> {
    let sockets = (0..interfaces).map(|id| Socket::new(&format!("vhost{id}")));
    let sockets = sockets.collect::<Vec<_>>();
    let devices = |device: &dyn Fn(usize, &Socket) -> String| -> Vec<String> {
        let each = sockets.iter().enumerate();
        each.map(|(id, path)| device(id, path)).collect()
    };
    let host = devices(&|id, path| format!("--vdev=net_vhost{id},iface={path},queues=1"));
    let sending = ["--forward-mode=txonly", &format!("--txpkts={len}")];
    let _host = Testpmd::start(WorkerCpu::Second, &host, &sending)?;
    for socket in &sockets {
        socket.awaited()?;
    }
    let guest = devices(&|id, path| {
        format!(
            "--vdev=net_virtio_user{id},path={path},queues=1,queue_size=1024,packed_vq=1,in_order=1,\
             mrg_rxbuf=0,vectorized=1"
        )
    });
    let mut guest = Testpmd::start(WorkerCpu::First, &guest, &["--forward-mode=rxonly"])?;
    guest.received(plan, interfaces)
}
