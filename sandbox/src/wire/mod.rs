//! A program's own wire: a network namespace whose only way out is a port of a switch, with a fence on it.
//!
//! ```text
//!  program ── eth0 ──> cable ──> fence ──> port of the switch
//!                                  ^
//!                     calls that were allowed, rules
//! ```
//!
//! The supervisor is the cable: when it dies, the interface is gone and the port is free. Nobody has to be root, and the
//! daemon needs no right that a reader of the switch would not need.

mod begun;
mod brief;
mod counts;
pub mod dhcp;
mod dialler;
mod error;
mod fence;
mod flow;
pub mod hello;
pub mod initial;
mod kept;
mod lease;
mod netlink;
mod plan;
mod quic;
mod seen;
mod served;
mod sets;
mod space;

use std::fmt::{self, Display};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::EventfdFlags;
use vnplug::{Client, Device, Port, PortOptions, Segments};
use vnplug_frame::aggregate::MAX_SEGMENTS;

pub use counts::{Counts, Passed};
pub use dialler::{Dialled, Dialler};
pub use error::WireError;
pub use fence::{Addresses, Fence, Names, Rules};
pub use plan::WirePlan;

use self::dhcp::Lease;
use self::space::{Space, SpacePlan, TapWish};
use crate::act::Who;
use crate::gate::Gate;
use crate::interface::cable::{Cable, Taken};
use crate::interface::tally::Tally;
use crate::name::Name;

/// A network namespace without a way out.
#[derive(Debug)]
pub struct Nowhere {
    space: Space,
}

/// The wire of a program. Dropping it cuts it.
#[derive(Debug)]
pub struct Wire {
    space: Space,
    fence: Arc<Fence>,
    dns: Vec<IpAddr>,
    /// Until it is started.
    ends: Option<(Cable<Arc<Fence>>, Port)>,
    device: String,
    running: Option<(OwnedFd, JoinHandle<Ended>)>,
    /// Whoever keeps its lease ends with this.
    kept: Option<Sender<()>>,
    /// Until it is started.
    lease: Option<(Lease, [u8; 6])>,
}

/// What a wire has moved, when it is over: `taken = sent + denied + dropped`, and `received = injected + merged + denied +
/// dropped`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// What the fence said of each frame.
    pub fence: Counts,
    /// What became of the program's frames.
    pub taken: Taken,
    /// What became of the switch's.
    pub received: Tally,
}

type Ended = (Taken, Tally);

/// Which network a program is to have.
#[derive(Clone, Debug, Default)]
pub enum Network {
    /// The host's.
    #[default]
    Host,
    /// None.
    Nowhere,
    /// A wire of its own.
    Wire {
        /// Which one.
        plan: WirePlan,
        /// The daemon's.
        socket: PathBuf,
        /// Whom programs ask for names (resolv.conf), if somebody answers in their place.
        nameservers: Vec<IpAddr>,
    },
}

/// The network that a program has.
#[derive(Debug)]
pub enum Place {
    /// The host's.
    Host,
    /// None.
    Nowhere(Nowhere),
    /// A wire of its own.
    Wire(Box<Wire>),
}

impl Network {
    /// Makes it. Called while the process has one thread.
    ///
    /// # Errors
    /// Why it cannot be made.
    pub(crate) fn make(&self) -> Result<Place, WireError> {
        Ok(match self {
            Self::Host => Place::Host,
            Self::Nowhere => Place::Nowhere(Nowhere::new()?),
            Self::Wire {
                plan,
                socket,
                nameservers,
            } => Place::Wire(Box::new(Wire::new(plan, socket, nameservers)?)),
        })
    }
}

impl Place {
    /// What the program's process calls before it gives anything up.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn enter(&self) -> io::Result<()> {
        match self {
            Self::Host => Ok(()),
            Self::Nowhere(nowhere) => nowhere.enter(),
            Self::Wire(wire) => wire.enter(),
        }
    }

    /// From now on frames move, judged by what this gate allows.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn start(&mut self, gate: &Gate) -> Result<(), WireError> {
        let Self::Wire(wire) = self else {
            return Ok(());
        };
        let (gate, names) = (gate.clone(), gate.clone());
        let rules = move |transport, peer| gate.allows_packet(transport, peer);
        wire.fence.ask_rules(Box::new(rules));
        let names = move |who: Option<&Arc<Who>>, transport, peer, name: &Name| {
            names.judge_name(who, transport, peer, name)
        };
        wire.fence.ask_names(Box::new(names));
        wire.start()
    }

    /// Its wire, if it has one.
    pub fn wire(&mut self) -> Option<&mut Wire> {
        match self {
            Self::Wire(wire) => Some(wire),
            Self::Host | Self::Nowhere(_) => None,
        }
    }

    /// Who judges its frames, if it has any.
    pub(crate) fn fence(&self) -> Option<Arc<Fence>> {
        match self {
            Self::Wire(wire) => Some(Arc::clone(&wire.fence)),
            Self::Host | Self::Nowhere(_) => None,
        }
    }

    /// The program has ended. What its wire has moved, if it had one.
    pub(crate) fn finish(self) -> Option<Summary> {
        match self {
            Self::Wire(wire) => Some(wire.finish()),
            Self::Host | Self::Nowhere(_) => None,
        }
    }
}

impl Display for Summary {
    /// `20 frames of the program = 12 sent + 8 denied + 0 dropped; …`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fence: Counts { sent, .. },
            taken,
            received,
        } = self;
        write!(
            f,
            "{} frames of the program = {} sent ({} of allowed calls, {} by rules, {} of the interface) + {} denied + {} \
             dropped; {} frames for it = {} given + {} merged + {} denied + {} dropped",
            taken.all,
            taken.sent,
            sent.permitted,
            sent.ruled,
            sent.kept,
            taken.denied,
            taken.dropped(),
            received.received,
            received.injected,
            received.merged,
            received.denied,
            received.dropped(),
        )
    }
}

impl Nowhere {
    /// Makes it: there is a loopback interface, and nothing else. Called while the process has one thread.
    ///
    /// # Errors
    /// Why there is none.
    pub fn new() -> Result<Self, WireError> {
        let space = Space::new(&SpacePlan {
            tap: None,
            nameservers: Vec::new(),
        })?;
        Ok(Self { space })
    }

    /// What a child calls before it executes the program; safe between fork and exec.
    ///
    /// # Errors
    /// The system's.
    pub fn enter(&self) -> io::Result<()> {
        self.space.enter()
    }
}

impl Wire {
    /// Makes the namespace and joins the switch of the daemon at `socket`. Nothing moves as yet. Called while
    /// the process has one thread.
    ///
    /// `nameservers` are those that programs ask, which is to say those of resolv.conf: they are answered by
    /// who gets [`questions`](Self::questions).
    ///
    /// # Errors
    /// Why there is none.
    pub fn new(plan: &WirePlan, socket: &Path, nameservers: &[IpAddr]) -> Result<Self, WireError> {
        let device = plan.device();
        let mac = match plan.mac {
            Some(mac) => mac,
            None => random_mac()?,
        };
        let mut port = PortOptions::new(&device)
            .socket(socket)
            .segments(Segments::Merged)
            .label("vnplug sandbox")
            .join()
            .open()
            .map_err(|error| WireError(format!("{device}: {error}")))?;
        let lease = match plan.leases() {
            true => Some(lease::acquire(&mut port, mac)?),
            false => None,
        };
        let (mut addresses, mut router) = (plan.addresses.clone(), plan.gateway);
        let mut dns = plan.dns.clone();
        if let Some(lease) = &lease {
            addresses.push((lease.address.into(), lease.bits));
            router = lease.router.map(IpAddr::from);
            if dns.is_empty() {
                dns.extend(lease.dns.iter().copied().map(IpAddr::from));
            }
        }
        let own: Vec<_> = addresses.iter().map(|(address, _)| *address).collect();
        let mut nameservers = nameservers.to_vec();
        // An address of our own, or of the one we ask, cannot be the loopback interface's too.
        nameservers.retain(|server| !dns.contains(server) && !own.contains(server));
        let mut space = Space::new(&SpacePlan {
            tap: Some(TapWish {
                mtu: plan.mtu.unwrap_or_else(|| mtu_of(socket, &device)),
                mac,
                addresses,
                router,
            }),
            nameservers,
        })?;
        let routers: Vec<_> = router.into_iter().collect();
        let fence = Arc::new(Fence::new(mac, &own, &routers));
        let netlink = space.netlink.take();
        let netlink = netlink.ok_or_else(|| WireError::new("no way to the network namespace"))?;
        let name = space.tap.as_ref().map_or("", |tap| tap.name());
        let index = netlink.index(name);
        let index = index.map_err(WireError::system("find the interface"))?;
        fence.ask_addresses(Box::new(move || netlink.addresses6(index).ok()));
        if !plan.fence {
            fence.open();
        }
        let tap = space
            .tap
            .take()
            .ok_or_else(|| WireError::new("no interface"))?;
        let cable = Cable::new(tap, Arc::clone(&fence), MAX_SEGMENTS as u8, false);
        let device = port.device().to_owned();
        Ok(Self {
            space,
            fence,
            dns,
            ends: Some((cable, port)),
            device,
            running: None,
            kept: None,
            lease: lease.map(|lease| (lease, mac)),
        })
    }

    /// What a child calls before it executes the program; safe between fork and exec.
    ///
    /// # Errors
    /// The system's.
    pub fn enter(&self) -> io::Result<()> {
        self.space.enter()
    }

    /// From now on frames move, on a thread of their own.
    ///
    /// # Errors
    /// The system's.
    pub fn start(&mut self) -> Result<(), WireError> {
        let Some((cable, port)) = self.ends.take() else {
            return Ok(());
        };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(WireError::system("make an event"))?;
        let stopped = stop
            .try_clone()
            .map_err(WireError::system("copy an event"))?;
        let thread = std::thread::Builder::new().name("vnplug-wire".to_owned());
        let thread = thread.spawn(move || drive(cable, port, &stopped));
        let thread = thread.map_err(WireError::system("start a thread"))?;
        self.running = Some((stop, thread));
        if let Some((lease, mac)) = self.lease.take() {
            self.keep(lease, mac)?;
        }
        Ok(())
    }

    /// Has a lease kept by a thread of its own.
    fn keep(&mut self, lease: Lease, mac: [u8; 6]) -> Result<(), WireError> {
        let (kept, cut) = mpsc::channel();
        let (dialler, fence) = (self.dialler(), Arc::clone(&self.fence));
        let thread = std::thread::Builder::new().name("vnplug-lease".to_owned());
        let run = move || {
            let address = lease.address;
            if !lease::keep(lease, mac, &dialler, &cut) {
                log::warn!("nobody gives {address} any longer: what is sent from it is dropped");
                fence.lose(address.into());
            }
        };
        thread
            .spawn(run)
            .map_err(WireError::system("start a thread"))?;
        self.kept = Some(kept);
        Ok(())
    }

    /// Who judges its frames.
    #[must_use]
    pub fn fence(&self) -> &Arc<Fence> {
        &self.fence
    }

    /// The device that is this port of the switch alone, as `host:lan0/port3`.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The sockets on which the program asks for names.
    pub fn questions(&mut self) -> Vec<(UdpSocket, TcpListener)> {
        std::mem::take(&mut self.space.questions)
    }

    /// Who is asked for names on the wire.
    #[must_use]
    pub fn servers(&self) -> Vec<SocketAddr> {
        let dns = self.dns.iter();
        dns.map(|server| SocketAddr::new(*server, DNS)).collect()
    }

    /// Makes sockets of the supervisor's own on the wire.
    #[must_use]
    pub fn dialler(&self) -> Dialler {
        Dialler {
            maker: Arc::clone(&self.space.maker),
            fence: Arc::clone(&self.fence),
        }
    }

    /// Cuts it. What it has moved.
    pub fn finish(mut self) -> Summary {
        let (taken, received) = self.stop().unwrap_or_default();
        Summary {
            fence: self.fence.counts(),
            taken,
            received,
        }
    }

    fn stop(&mut self) -> Option<Ended> {
        self.kept = None;
        let (stop, thread) = self.running.take()?;
        // It has room: nobody else writes there.
        let _ = rustix::io::write(&stop, &1_u64.to_ne_bytes());
        thread.join().ok()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Moves frames until it is told to stop, or the switch is gone for good.
fn drive(mut cable: Cable<Arc<Fence>>, mut port: Port, stop: &OwnedFd) -> Ended {
    loop {
        let moved = cable.turn(&mut port).and_then(|moved| match moved {
            0 => cable.idle(&mut port, TICK, Some(stop.as_fd())),
            _ => Ok(true),
        });
        match moved {
            Ok(true) => {}
            Ok(false) => {
                log::warn!("the switch is gone: the program has no network any more");
                break;
            }
            Err(error) => {
                log::warn!("the program has no network any more: {error}");
                break;
            }
        }
        if rustix::io::read(stop, &mut [0; 8]).is_ok() {
            // What the program sent before it ended goes out.
            let _ = cable.turn(&mut port);
            cable.tap().leave();
            break;
        }
    }
    cable.end();
    (*cable.taken(), *cable.received())
}

/// The MTU of a device's interface; of a device without one, that of any Ethernet.
fn mtu_of(socket: &Path, device: &str) -> u16 {
    let devices = Client::connect_to(socket).and_then(|mut client| client.devices());
    let own = |devices: Vec<Device>| devices.into_iter().find(|known| known.name == device);
    let mtu = devices.ok().and_then(own).map_or(0, |device| device.mtu);
    match u16::try_from(mtu).unwrap_or(u16::MAX) {
        0 => 1500,
        mtu => mtu.clamp(68, 65521),
    }
}

/// A hardware address of our own: the bit for that is set, the bit of groups is not (IEEE 802, 8.4).
fn random_mac() -> Result<[u8; 6], WireError> {
    let mut mac = [0; 6];
    let filled = rustix::rand::getrandom(&mut mac, rustix::rand::GetRandomFlags::empty());
    filled.map_err(WireError::system("have a random address"))?;
    mac[0] = (mac[0] | 2) & !1;
    Ok(mac)
}

const DNS: u16 = 53;
/// How often it is looked whether the daemon is away.
const TICK: Duration = Duration::from_secs(1);
