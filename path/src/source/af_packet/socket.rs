//! Opens the packet sockets of an interface, again whenever the interface came back.
//!
//! A socket is made deaf (a filter that refuses everything), gets its ring, is bound, joins its
//! group, and only then [`Opener::start`] gives it the real filter: frames neither come from other
//! interfaces nor twice. A queue has one such socket, or two with a reserve ([`rings`](super::rings)).

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use libc::{c_int, sock_filter};

use super::rings::Rings;
use super::{AfPacketConfig, Direction, is_capturable, kernel};
use crate::source::SourceError;
use crate::source::early::{Loaded, Seat};
use vnplug_filter::ebpf::SocketShape;
use vnplug_os::interface;
use vnplug_os::interface::Link;
use vnplug_os::kept::Keeping;
use vnplug_os::namespace::Id;
use vnplug_os::packet::{Ring, RingShape, Socket};

/// Opens sockets of one configuration; shared by the queues of an interface.
#[derive(Debug)]
pub(super) struct Opener {
    config: AfPacketConfig,
    /// The fanout group's id, once there is one.
    pub(super) group: Mutex<Option<u16>>,
    /// Whether the kernel takes sockets of an interface that is down into a group (Linux ≥ 6.10).
    groups_down: bool,
}

/// A queue's rings, bound to an interface.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) rings: Rings,
    pub(super) link: Link,
    /// Where, if the configuration names a network namespace.
    pub(super) namespace: Option<Id>,
    /// Which of the interface's queues.
    pub(super) queue: u32,
    /// The sockets, as long as somebody keeps them over a restart.
    pub(super) keeping: Vec<Keeping>,
    /// Another process received into them before.
    pub(super) resumed: bool,
}

impl Opener {
    pub(super) fn new(config: AfPacketConfig) -> Self {
        Self {
            config,
            group: Mutex::new(None),
            groups_down: kernel() >= (6, 10),
        }
    }

    pub(super) fn config(&self) -> &AfPacketConfig {
        &self.config
    }

    /// Opens the sockets of one queue with their rings, deaf until [`start`](Self::start).
    pub(super) fn open(self: &Arc<Self>, queue: u32) -> Result<Bound, SourceError> {
        let Some(namespace) = &self.config.namespace else {
            return self.open_here(queue);
        };
        let own = Arc::clone(self);
        let (bound, id) = namespace.within(move || own.open_here(queue))?;
        Ok(Bound {
            namespace: Some(id),
            ..bound?
        })
    }

    /// As [`open`](Self::open), in the calling thread's network namespace.
    fn open_here(&self, queue: u32) -> Result<Bound, SourceError> {
        let name = self.config.interface.as_str();
        let socket = Socket::open().map_err(cannot_open)?;
        let link = self.link(&socket)?;
        if !is_capturable(link.hardware) {
            return Err(SourceError::new(format!(
                "interface {name:?} is not Ethernet but {} (ARPHRD {}); only Ethernet and \
                 loopback interfaces can be captured",
                hardware_name(link.hardware),
                link.hardware
            )));
        }
        // Asked first, because a ring is expensive, and this is asked again until the interface is up.
        if self.config.queues > 1 && !link.up && !self.groups_down {
            return Err(SourceError::new(is_down(name)));
        }
        let (shape, spare) = self.ring_shapes();
        let main = self.receiver(socket, link, shape)?;
        let socket = main.socket();
        if self.config.promiscuous && link.hardware == libc::ARPHRD_ETHER {
            socket
                .set_promiscuous(link.index)
                .map_err(self.failed("enter promiscuous mode"))?;
        }
        if self.config.queues > 1 {
            self.join(socket).map_err(|cause| match link.up {
                true => self.failed("join the queues' fanout group")(cause),
                false => SourceError::io(is_down(name), cause),
            })?;
        }
        let reserve = spare.and_then(|spare| {
            let reserve = self.reserve(&main, link, spare);
            reserve
                .inspect_err(|error| {
                    log::warn!(target: "source", "interface {name:?} has no reserve: {error}");
                })
                .ok()
        });
        let rings = Rings::new(main, reserve, self.config.offload);
        Ok(Bound {
            keeping: self.keep(queue, &rings),
            rings,
            link,
            namespace: None,
            queue,
            resumed: false,
        })
    }

    /// The shapes of a queue's rings: of the main one, and of the reserve if there is to be one.
    pub(super) fn ring_shapes(&self) -> (RingShape, Option<RingShape>) {
        let config = &self.config;
        let page = rustix::param::page_size() as u32;
        let shape = |blocks, timeout_ms| RingShape {
            block_size: config.block_size.next_multiple_of(page),
            blocks,
            timeout_ms,
        };
        match config.shares() {
            None => (shape(config.blocks, config.block_timeout_ms), None),
            Some(shares) => (
                shape(shares.main, config.block_timeout_ms),
                Some(shape(shares.reserve, shares.reserve_timeout_ms)),
            ),
        }
    }

    /// Gives a socket its ring and binds it.
    fn receiver(&self, socket: Socket, link: Link, shape: RingShape) -> Result<Ring, SourceError> {
        socket
            .set_filter(&[DROP])
            .map_err(self.failed("set a filter"))?;
        self.prepare(&socket, link)
            .map_err(self.failed("set packet socket options"))?;
        let ring = self.ring(socket, shape)?;
        ring.socket()
            .bind(link.index)
            .map_err(self.failed("bind"))?;
        Ok(ring)
    }

    /// Opens the ring that takes over where `main` has no room.
    fn reserve(&self, main: &Ring, link: Link, shape: RingShape) -> Result<Ring, SourceError> {
        let reserve = self.receiver(Socket::open().map_err(cannot_open)?, link, shape)?;
        // A group by a program that it was not given: all frames are the first member's, or where that
        // has no room the next one's.
        let group = |id: u16, flags: u32| {
            let kind = libc::PACKET_FANOUT_CBPF | libc::PACKET_FANOUT_FLAG_ROLLOVER | flags;
            (u32::from(id) | kind << 16) as c_int
        };
        let failed = || self.failed("join a group");
        let (first, next) = (main.socket(), reserve.socket());
        first
            .set(
                libc::PACKET_FANOUT,
                group(0, libc::PACKET_FANOUT_FLAG_UNIQUEID),
            )
            .map_err(failed())?;
        let id = first.get(libc::PACKET_FANOUT).map_err(failed())? as u16;
        next.set(libc::PACKET_FANOUT, group(id, 0))
            .map_err(failed())?;
        Ok(reserve)
    }

    fn failed(&self, step: &'static str) -> impl Fn(io::Error) -> SourceError {
        let what = format!("cannot {step} on interface {:?}", self.config.interface);
        move |cause| SourceError::io(what.clone(), cause)
    }

    /// Lets frames in: those of its direction.
    pub(super) fn start(&self, bound: &Bound) -> Result<(), SourceError> {
        self.filter(&bound.rings, bound.link, None)
    }

    /// Lets in the frames of its direction, or those of them that an early filter passes. The
    /// kernel changes from one to the other between two frames.
    ///
    /// # Errors
    /// [`SourceError`]: what was there before stays, at one of two sockets perhaps.
    pub(super) fn filter(
        &self,
        rings: &Rings,
        link: Link,
        early: Option<&Loaded>,
    ) -> Result<(), SourceError> {
        let mut sockets = rings.sockets();
        sockets.try_for_each(|socket| self.filter_one(socket, link, early))
    }

    fn filter_one(
        &self,
        socket: &Socket,
        link: Link,
        early: Option<&Loaded>,
    ) -> Result<(), SourceError> {
        let direction = self.direction(link);
        match (early, &self.config.gate) {
            (Some(early), _) => early.attach(socket, self.shape(direction)),
            (None, Some(gate)) => gate.0.attach_to_socket(socket),
            (None, None) => socket.set_filter(&program(direction, self.config.snaplen)),
        }
        .map_err(self.failed("set a filter"))
    }

    /// Where a queue of this interface takes an early filter, or why it does not.
    pub(super) fn seat(&self, link: Link) -> Result<Seat, String> {
        if !self.config.early {
            return Err("off: as configured".into());
        }
        let direction = self.direction(link);
        let seat = self.config.seats.socket(self.shape(direction));
        seat.map_err(|cause| match cause.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                "off: no permission to use eBPF; it needs root or CAP_BPF".into()
            }
            _ => format!("off: this kernel lacks what it needs: {cause}"),
        })
    }

    fn shape(&self, direction: Direction) -> SocketShape {
        SocketShape {
            outbound: match direction {
                Direction::Both => None,
                Direction::Rx => Some(false),
                Direction::Tx => Some(true),
            },
            snaplen: self.config.snaplen,
        }
    }

    /// Whether there is an interface of that name now.
    pub(super) fn is_there(self: &Arc<Self>) -> Result<bool, SourceError> {
        let Some(namespace) = &self.config.namespace else {
            return self.is_here(&Socket::open().map_err(cannot_open)?);
        };
        if namespace.id().is_none() {
            return Ok(false);
        }
        if let Some(is_there) = namespace.ask(|socket| self.is_here(&socket)) {
            return is_there;
        }
        // Whoever may not open packet sockets there need not wait for it.
        let (may, _) = namespace.within(|| Socket::open().map(drop).map_err(cannot_open))?;
        may?;
        let is_there = namespace.ask(|socket| self.is_here(&socket));
        is_there.unwrap_or(Ok(false))
    }

    fn is_here(&self, socket: &impl AsFd) -> Result<bool, SourceError> {
        match interface::link(socket, &self.config.interface) {
            Err(cause) if is_absent(&cause) => Ok(false),
            _ => self.link(socket).map(|_| true),
        }
    }

    /// Asks about the interface by name.
    pub(super) fn link(&self, socket: &impl AsFd) -> Result<Link, SourceError> {
        let name = &self.config.interface;
        interface::link(socket, name).map_err(|cause| match is_absent(&cause) {
            true => SourceError::new(format!(
                "no interface {name:?} here; list them with: ip link"
            )),
            false => SourceError::io(format!("cannot ask about interface {name:?}"), cause),
        })
    }

    /// Frames of which direction are received on this interface.
    pub(super) fn direction(&self, link: Link) -> Direction {
        let loopback = link.hardware == libc::ARPHRD_LOOPBACK;
        match self.config.direction {
            Direction::Both if loopback => Direction::Rx,
            direction => direction,
        }
    }

    fn prepare(&self, socket: &Socket, link: Link) -> io::Result<()> {
        let headroom = match self.config.offload {
            true => HEADROOM_WITH_HEADER,
            false => HEADROOM,
        };
        socket.set(libc::PACKET_RESERVE, headroom)?;
        if self.config.offload {
            socket.set(PACKET_VNET_HDR, 1)?;
        }
        if let Some(bytes) = self.config.send_bytes {
            // The kernel halves it again.
            socket.set_send_buffer(bytes as c_int / 2)?;
        }
        if self.direction(link) == Direction::Rx {
            // Saves the kernel the work; the filter alone would do.
            socket.set(libc::PACKET_IGNORE_OUTGOING, 1)?;
        }
        // The time of a frame is then what every other reader of the wire has, to the nanosecond.
        socket.stamp_in_kernel()?;
        if self.config.hardware_timestamps {
            if let Err(cause) = socket.stamp_in_hardware(&self.config.interface) {
                let name = &self.config.interface;
                log::warn!(target: "source", "interface {name:?} gives no hardware timestamps: {cause}");
            }
            socket.set(
                libc::PACKET_TIMESTAMP,
                libc::SOF_TIMESTAMPING_RAW_HARDWARE as c_int,
            )?;
        }
        Ok(())
    }

    fn ring(&self, socket: Socket, shape: RingShape) -> Result<Ring, SourceError> {
        let (block_size, blocks) = (shape.block_size, shape.blocks);
        socket.into_ring(shape).map_err(|cause| {
            let short = match cause.raw_os_error() {
                Some(libc::ENOMEM) => "; lower blocks or block_size",
                _ => "",
            };
            let bytes = u64::from(block_size) * u64::from(blocks);
            let what = format!(
                "cannot have a receive ring of {blocks} blocks of {block_size} bytes ({} MiB) \
                 for interface {:?}{short}",
                bytes >> 20,
                self.config.interface
            );
            SourceError::io(what, cause)
        })
    }

    /// Joins the group; founds a new one if there is none, or it belongs to an interface that is
    /// gone (the kernel refuses to mix interfaces).
    fn join(&self, socket: &Socket) -> io::Result<()> {
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        let join = |id: u16, flags: u32| {
            let word = u32::from(id) | (libc::PACKET_FANOUT_HASH | flags) << 16;
            socket.set(libc::PACKET_FANOUT, word as c_int)
        };
        if let Some(id) = *group
            && join(id, 0).is_ok()
        {
            return Ok(());
        }
        join(0, libc::PACKET_FANOUT_FLAG_UNIQUEID)?;
        *group = Some(socket.get(libc::PACKET_FANOUT)? as u16);
        Ok(())
    }
}

/// The classic BPF program of a direction, which also cuts frames to `snaplen` bytes.
fn program(direction: Direction, snaplen: u32) -> Vec<sock_filter> {
    let load_type = sock_filter {
        code: (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16,
        jt: 0,
        jf: 0,
        k: (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32,
    };
    let outgoing = |jt, jf| sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt,
        jf,
        k: u32::from(libc::PACKET_OUTGOING),
    };
    let accept = sock_filter { k: snaplen, ..DROP };
    match direction {
        Direction::Both => vec![accept],
        Direction::Rx => vec![load_type, outgoing(0, 1), DROP, accept],
        Direction::Tx => vec![load_type, outgoing(1, 0), DROP, accept],
    }
}

fn is_down(name: &str) -> String {
    format!("interface {name:?} is down; bring it up first: ip link set {name} up")
}

fn is_absent(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::ENODEV | libc::ENXIO))
}

fn cannot_open(cause: io::Error) -> SourceError {
    let what = match cause.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "no permission to open a packet socket; it needs root or CAP_NET_RAW"
        }
        Some(libc::EAFNOSUPPORT) => "this kernel has no packet sockets (CONFIG_PACKET)",
        _ => "cannot open a packet socket",
    };
    SourceError::io(what, cause)
}

fn hardware_name(hardware: u16) -> &'static str {
    match hardware {
        libc::ARPHRD_NONE => "a device without link layer, such as tun or WireGuard",
        libc::ARPHRD_PPP => "PPP",
        libc::ARPHRD_TUNNEL | libc::ARPHRD_TUNNEL6 | libc::ARPHRD_SIT | libc::ARPHRD_IPGRE => {
            "an IP tunnel"
        }
        libc::ARPHRD_INFINIBAND => "InfiniBand",
        libc::ARPHRD_IEEE80211..=libc::ARPHRD_IEEE80211_RADIOTAP => "a wireless monitor",
        _ => "another kind",
    }
}

const DROP: sock_filter = sock_filter {
    code: (libc::BPF_RET | libc::BPF_K) as u16,
    jt: 0,
    jf: 0,
    k: 0,
};

/// Bytes before each frame: room for a VLAN tag, and what keeps the IP header's alignment at 8.
const HEADROOM: c_int = 8;
/// With a virtio-net header of 10 bytes between, which makes room for a tag once it was read.
const HEADROOM_WITH_HEADER: c_int = 6;
/// Of `linux/if_packet.h`: frames come and go with a virtio-net header before them.
pub(super) const PACKET_VNET_HDR: c_int = 15;

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::Namespace;
    use super::*;

    /// A network namespace that is removed in any case.
    struct Netns(String);

    impl Drop for Netns {
        fn drop(&mut self) {
            ip(&format!("netns delete {}", self.0));
        }
    }

    fn ip(words: &str) {
        let status = Command::new("ip").args(words.split(' ')).status();
        assert!(status.expect("run ip").success(), "ip {words}");
    }

    #[test]
    fn where_a_group_takes_no_interface_that_is_down_no_ring_is_made_for_it() {
        let netns = Netns(format!("vnplug-group-{}", std::process::id()));
        let name = &netns.0;
        ip(&format!("netns add {name}"));
        ip(&format!(
            "-n {name} link add down0 type veth peer name down1"
        ));
        let namespace = Namespace::new(name, Arc::default()).unwrap();
        let config = AfPacketConfig {
            queues: 2,
            block_size: 1 << 16,
            blocks: 2,
            namespace: Some(Arc::new(namespace)),
            ..AfPacketConfig::new("down0")
        };
        let open = |groups_down| {
            let opener = Arc::new(Opener {
                config: config.clone(),
                group: Mutex::default(),
                groups_down,
            });
            opener.open(0).map_err(|error| error.to_string())
        };
        // Not what the kernel says of a socket that has its ring already.
        assert_eq!(open(false).unwrap_err(), is_down("down0"));
        if kernel() >= (6, 10) {
            assert!(!open(true).unwrap().link.up);
        }
    }
}
