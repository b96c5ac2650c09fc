//! A guest that rings its doorbell without end.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use vnplug::Client;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::Raw;
use vnplug_ring::control::{Message, VmKind, VmReady, VmSpec};

const VECTORS: u32 = 2;
const TIME: Duration = Duration::from_secs(2);

fn attach(operator: &mut Client, name: &str) -> VmReady {
    let spec = VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes: 1 << 20,
        vectors: VECTORS,
        allow: Vec::new(),
        owner: 1,
        groups: Vec::new(),
        stays_for: None,
    };
    operator.attach_vm(spec).expect("a VM")
}

/// Plays QEMU: its connection, what the guest's register writes, and the vectors.
fn plug(ready: &VmReady) -> (UnixStream, OwnedFd, Vec<OwnedFd>) {
    let server = UnixStream::connect(&ready.doorbell_path).expect("it listens");
    let mut fds = Vec::new();
    for _ in 0..4 + VECTORS {
        let mut bytes = [0; 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut bytes)];
        recvmsg(&server, into, &mut control, RecvFlags::CMSG_CLOEXEC).expect("the handshake");
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
    }
    let mut fds = fds.into_iter().skip(1);
    let own = fds.next().expect("the daemon's eventfd");
    (server, own, fds.collect())
}

#[test]
fn a_guest_that_rings_without_end_costs_little_and_reaches_only_the_daemon() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let [(_a, own, _irqs), (_b, _, others)] = ["loud", "quiet"].map(|name| {
        let ready = attach(&mut operator, name);
        plug(&ready)
    });
    let before = daemon.cpu_at_rest(Duration::from_millis(200), Duration::from_millis(5));
    let over = AtomicBool::new(false);
    let (rings, used, longest) = thread::scope(|scope| {
        let storm = scope.spawn(|| {
            let mut rings = 0_u64;
            while !over.load(Ordering::Relaxed) {
                rustix::io::write(&own, &1_u64.to_ne_bytes()).unwrap();
                rings += 1;
            }
            rings
        });
        let (spent, begun) = (daemon.cpu_time(), Instant::now());
        let mut bystander = Raw::greeted(&daemon.socket());
        let mut longest = Duration::ZERO;
        while begun.elapsed() < TIME {
            let asked = Instant::now();
            assert!(matches!(
                bystander.ask(&Message::List, 0),
                Message::Devices(_)
            ));
            longest = longest.max(asked.elapsed());
            thread::sleep(Duration::from_millis(50));
        }
        let used = daemon.cpu_time().saturating_sub(spent);
        over.store(true, Ordering::Relaxed);
        (storm.join().unwrap(), used, longest)
    });
    let counters = daemon.audit();
    let vm = |name: &str| {
        let mut all = counters.iter();
        all.find(|it| it.kind == "vm" && it.name == name).unwrap()
    };
    let (heard, raised) = (
        value(vm("loud"), "doorbell_from_guest"),
        value(vm("loud"), "doorbell_to_guest"),
    );
    println!(
        "{rings} rings in {TIME:?}: {heard} heard, {raised} answered, {used:?} of processor time beside \
         {before:?} at rest; the longest List took {longest:?}"
    );
    // A storm it was, and what comes within a millisecond is one.
    assert!(
        rings > 100_000 && raised > 0,
        "{rings} rings, {raised} answers"
    );
    assert!(raised <= 2 * TIME.as_millis() as u64, "{raised} answers");
    assert!(used < TIME / 10, "{used:?} of processor time");
    assert!(longest < Duration::from_secs(1), "{longest:?}");
    // The other guest's vectors were not touched.
    assert_eq!(value(vm("quiet"), "doorbell_to_guest"), 0);
    for irq in &others {
        rustix::io::ioctl_fionbio(irq, true).unwrap();
        let read = rustix::io::read(irq, &mut [0; 8]);
        assert_eq!(read, Err(rustix::io::Errno::AGAIN));
    }
}
