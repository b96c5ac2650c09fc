//! Attaches the program and opens the sockets of an interface, again whenever it came back.
//!
//! The order: program loaded and attached (frames pass to the host), sockets bound, and only then
//! [`Opener::start`] puts them into the program's map. The program and the map outlive an interface;
//! what depends on it is made again: the link, by the queue that finds the new interface first, and
//! each queue's socket, on the packet memory that the queue had.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::fault::{self, Unfit};
use super::lending::{self, Lending};
use super::program::{self, ProgramPlan, Programs};
use super::{AfXdpConfig, MAX_QUEUES, Mode, netlink};
use crate::source::SourceError;
use crate::source::af_packet::is_capturable;
use vnplug_os::bpf;
use vnplug_os::bpf::{Hook, XdpLink};
use vnplug_os::interface;
use vnplug_os::interface::Link;
use vnplug_os::packet;
use vnplug_os::umem::{Umem, UmemShape};
use vnplug_os::xdp::{Binding, Socket};

/// Opens sockets of one configuration; shared by the queues of an interface.
#[derive(Debug)]
pub(super) struct Opener {
    config: AfXdpConfig,
    plan: Arc<ProgramPlan>,
    /// The program that drops nothing early.
    base: Programs,
    held: Mutex<Held>,
    /// The most receive queues that the interface was seen with.
    channels: AtomicU32,
    /// Chunks to receive into, of each queue.
    frames: u32,
}

/// What depends on the present interface.
#[derive(Debug)]
struct Held {
    index: i32,
    hook: Hook,
    frags: bool,
    /// The program that is there, if it drops something early.
    narrowed: Option<Box<Programs>>,
    /// The program stays at the interface while this lives.
    at: XdpLink,
    /// The interface stays promiscuous while this lives.
    _promiscuous: Option<packet::Socket>,
}

/// A socket bound to a receive queue.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) socket: Socket,
    pub(super) link: Link,
    pub(super) hook: Hook,
    pub(super) how: Binding,
}

impl Opener {
    /// Loads and attaches the program; tells which receive queues there are to be.
    pub(super) fn open(config: AfXdpConfig) -> Result<(Self, Vec<u32>), Unfit> {
        let link = link(&config.interface)?;
        let (queues, count) = queues(&config, link)?;
        program::check(config.take.as_ref()).map_err(Unfit::other)?;
        raise_locked_memory();
        let no_program = |cause| Unfit::xdp(fault::no_program(cause));
        let plan = ProgramPlan::new(&config, MAX_QUEUES).map_err(|cause| {
            let log = String::new();
            no_program(bpf::LoadError { cause, log })
        })?;
        let base = plan.load(None).map_err(no_program)?;
        let held = attach(&config, &base, link).map_err(Unfit::xdp)?;
        let opener = Self {
            frames: config.frames(queues.len()),
            config,
            plan: Arc::new(plan),
            base,
            held: Mutex::new(held),
            channels: AtomicU32::new(count),
        };
        Ok((opener, queues))
    }

    pub(super) fn config(&self) -> &AfXdpConfig {
        &self.config
    }

    /// Says so if VLAN tags do not come with the frames.
    pub(super) fn look_at_tags(&self) {
        let name = &self.config.interface;
        if any_socket().is_ok_and(|any| interface::strips_vlan_tags(&any, name)) {
            log::warn!(
                target: "source",
                "interface {name:?} takes VLAN tags out of frames, and XDP does not see them: to have \
                 them, ethtool -K {name} rxvlan off (veth: txvlan off at the other end)"
            );
        }
    }

    /// Chunks of a queue to receive into.
    pub(super) fn frames(&self) -> u32 {
        self.frames
    }

    /// What its programs have in common.
    pub(super) fn plan(&self) -> &Arc<ProgramPlan> {
        &self.plan
    }

    /// Replaces the present program by one that drops early, for all queues.
    pub(super) fn narrow(&self, programs: Box<Programs>) -> Result<(), SourceError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let program = match held.frags {
            true => programs.frags.as_ref(),
            false => Some(&programs.plain),
        };
        let replaced = program.map(|program| held.at.replace(program));
        match replaced {
            Some(Ok(())) => {
                held.narrowed = Some(programs);
                Ok(())
            }
            // The interface is gone: the next one gets it.
            Some(Err(cause)) if cause.raw_os_error() == Some(libc::ENOLINK) => {
                held.narrowed = Some(programs);
                Ok(())
            }
            Some(Err(cause)) => {
                let what = format!("cannot set a filter on {:?}", self.config.interface);
                Err(SourceError::io(what, cause))
            }
            None => Err(SourceError::new(
                "the kernel takes no filter for long frames",
            )),
        }
    }

    /// Packet memory for this many queues, and the parts to lend.
    pub(super) fn umems(&self, count: usize) -> Result<(Vec<Umem>, Option<Lending>), Unfit> {
        if !self.config.lends {
            let umems: Result<_, _> = (0..count).map(|_| self.umem()).collect();
            return Ok((umems?, None));
        }
        let made = lending::make(self.shape(), count, self.config.lends_in.as_ref());
        let (umems, lending) = made.map_err(|cause| self.no_memory(cause))?;
        say_pages(lending.bytes(), lending.is_huge());
        Ok((umems, Some(lending)))
    }

    /// Packet memory for one queue, which is not lent; also to replace lent memory that is lost.
    pub(super) fn umem(&self) -> Result<Umem, Unfit> {
        let shape = self.shape();
        let (umem, huge) = Umem::alone(shape).map_err(|cause| self.no_memory(cause))?;
        say_pages(shape.bytes(), huge);
        Ok(umem)
    }

    pub(super) fn no_memory(&self, cause: io::Error) -> Unfit {
        let bytes = self.shape().chunk_bytes();
        Unfit::xdp(fault::no_socket(&self.config.interface, bytes, cause))
    }

    /// Binds a socket on this memory to a receive queue of the interface that has the name now;
    /// waits for `patience` where another socket is in the way.
    ///
    /// # Errors
    /// What is wrong, and the memory.
    pub(super) fn bind(
        &self,
        queue: u32,
        umem: Umem,
        patience: Duration,
    ) -> Result<Bound, (Unfit, Umem)> {
        let name = &self.config.interface;
        let (link, hook, frags) = match self.hold() {
            Ok(held) => held,
            Err(error) => return Err((error, umem)),
        };
        let mut socket = match Socket::open(umem) {
            Ok(socket) => socket,
            Err((cause, umem)) => {
                let error = fault::no_socket(name, umem.shape().chunk_bytes(), cause);
                return Err((Unfit::xdp(error), umem));
            }
        };
        if self.config.busy_poll_us > 0
            && let Err(cause) = socket.prefer_busy_poll(self.config.busy_poll_us, BUSY_POLL_BUDGET)
        {
            log::warn!(
                target: "source",
                "interface {name:?}: no busy polling: {cause}; it needs CAP_NET_ADMIN, which the \
                 daemon has at start alone, and Linux 5.11"
            );
        }
        let until = Instant::now() + patience;
        match self.bind_socket(&mut socket, (link, queue), hook, frags, until) {
            Ok(how) => Ok(Bound {
                socket,
                link,
                hook,
                how,
            }),
            Err(error) => Err((Unfit::xdp(error), socket.close())),
        }
    }

    /// Lets frames in.
    pub(super) fn start(&self, queue: u32, bound: &Bound) -> Result<(), SourceError> {
        let socket = bound.socket.descriptor();
        let set = self.plan.sockets.set_socket(queue, socket);
        set.map_err(|cause| {
            let name = &self.config.interface;
            SourceError::io(format!("cannot receive queue {queue} of {name:?}"), cause)
        })
    }

    /// Says it if the interface has more receive queues than before, which nobody reads.
    pub(super) fn look_at_channels(&self, socket: &OwnedFd) {
        let name = &self.config.interface;
        let Some(now) = interface::receive_queues(socket, name) else {
            return;
        };
        // Relaxed: a number that nothing else depends on; the larger one is told once.
        let before = self.channels.fetch_max(now, Ordering::Relaxed);
        if now > before && self.config.queues.is_empty() {
            log::warn!(
                target: "source",
                "interface {name:?} has {now} receive queues now, and {before} of them are read: \
                 frames of the others pass to the host; restart the daemon to read them all"
            );
        }
    }

    /// Asks about the interface by name.
    pub(super) fn link(&self) -> Result<Link, SourceError> {
        link(&self.config.interface)
    }

    /// What was chosen, for people.
    pub(super) fn describe(&self, bound: &[(u32, Bound)]) -> String {
        let name = &self.config.interface;
        let mode = match bound.first() {
            Some((_, bound)) => match (bound.hook, bound.how.zero_copy) {
                (Hook::Native, true) => "zero-copy",
                (Hook::Native, false) => "native, copied by the kernel",
                (Hook::Generic, _) => "generic, copied by the kernel",
            },
            None => "no queue",
        };
        let count = bound.len();
        let taken = match self.config.take {
            None => "every frame that it receives",
            Some(_) => "what take= matches",
        };
        let s = if count == 1 { "" } else { "s" };
        format!("interface {name}, XDP {mode}, {count} queue{s}, takes {taken} from the host")
    }

    /// The interface of the name, with the program attached.
    fn hold(&self) -> Result<(Link, Hook, bool), Unfit> {
        let link = self.link()?;
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.index != link.index {
            let narrowed = held.narrowed.take();
            let programs = narrowed.as_deref().unwrap_or(&self.base);
            // Everything is more than what was wanted, and never too little.
            *held = match attach(&self.config, programs, link) {
                Ok(held) => Held { narrowed, ..held },
                Err(_) => attach(&self.config, &self.base, link).map_err(Unfit::xdp)?,
            };
        }
        Ok((link, held.hook, held.frags))
    }

    fn bind_socket(
        &self,
        socket: &mut Socket,
        (link, queue): (Link, u32),
        hook: Hook,
        frags: bool,
        until: Instant,
    ) -> Result<Binding, SourceError> {
        let name = &self.config.interface;
        let fits = fits(&self.config, link);
        let forced = self.config.mode == Mode::ZeroCopy;
        let not_bound = |cause| fault::not_bound(name, queue, forced, cause);
        let mut last = None;
        for how in bindings(self.config.mode, hook, frags, fits) {
            match patiently(until, || socket.bind(link.index, queue, how)) {
                Ok(()) => return Ok(how),
                Err(cause) if cause.raw_os_error() == Some(libc::EBUSY) => {
                    return Err(not_bound(cause));
                }
                Err(cause) => {
                    log::debug!(target: "source", "interface {name:?}, {how:?}: {cause}");
                    last = Some(cause);
                }
            }
        }
        match last {
            Some(cause) if fits => Err(not_bound(cause)),
            _ => Err(fault::mtu_too_large(name, link.mtu, self.config.room())),
        }
    }

    fn shape(&self) -> UmemShape {
        let shape = UmemShape {
            chunk: self.config.frame_size,
            receive: self.frames,
            kept: 0,
            transmit: TRANSMIT_CHUNKS,
            spare: 0,
            headroom: self.config.headroom(),
        };
        match self.config.lends {
            true => lending::shape(shape),
            false => shape,
        }
    }
}

/// Ways to bind a socket, best first.
fn bindings(mode: Mode, hook: Hook, frags: bool, fits: bool) -> Vec<Binding> {
    let zero_copies: &[bool] = match (mode, hook) {
        (Mode::ZeroCopy, _) => &[true],
        (Mode::Auto, Hook::Native) => &[true, false],
        _ => &[false],
    };
    let mut ways = Vec::new();
    for &zero_copy in zero_copies {
        for frags in [true, false].into_iter().filter(|&it| frags || !it) {
            if frags || fits {
                ways.push(Binding { zero_copy, frags });
            }
        }
    }
    ways
}

/// Whether every frame fits into one chunk.
fn fits(config: &AfXdpConfig, link: Link) -> bool {
    link.mtu.saturating_add(fault::HEADERS) <= config.room()
}

/// Attaches the program in the best way that works.
fn attach(config: &AfXdpConfig, programs: &Programs, link: Link) -> Result<Held, SourceError> {
    let name = &config.interface;
    let hooks: &[Hook] = match config.mode {
        Mode::Auto => &[Hook::Native, Hook::Generic],
        Mode::ZeroCopy | Mode::Native => &[Hook::Native],
        Mode::Generic => &[Hook::Generic],
    };
    let frags = programs.frags.as_ref();
    let mut ways: Vec<_> = frags.map(|it| (it, true)).into_iter().collect();
    if fits(config, link) {
        ways.push((&programs.plain, false));
    }
    let mut last = None;
    for &hook in hooks {
        for &(program, frags) in &ways {
            match attach_once(program, link, hook) {
                Ok(held) => {
                    return Ok(Held {
                        index: link.index,
                        hook,
                        frags,
                        narrowed: None,
                        at: held,
                        _promiscuous: promiscuous(config, link)?,
                    });
                }
                Err(cause) => {
                    if let Some(libc::EBUSY | libc::EEXIST) = cause.raw_os_error()
                        && let Ok(state) = netlink::xdp_state(link.index)
                        && state.program != 0
                    {
                        return Err(fault::already_attached(name, state.program, cause));
                    }
                    log::debug!(target: "source", "interface {name:?}, {hook:?}: {cause}");
                    last = Some((hook, cause));
                }
            }
        }
    }
    Err(match last {
        Some((hook, cause)) => fault::not_attached(name, link.mtu, hook, cause),
        None => fault::mtu_too_large(name, link.mtu, config.room()),
    })
}

/// Attaches a program, and waits a moment for one of ours whose process ended a moment ago.
fn attach_once(program: &bpf::Program, link: Link, hook: Hook) -> io::Result<XdpLink> {
    let until = Instant::now() + ATTACH_PATIENCE;
    patiently(until, || XdpLink::attach(program, link.index, hook))
}

/// Tries again while something is busy, ever less often.
fn patiently<T>(until: Instant, mut what: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut pause = Duration::from_millis(5);
    loop {
        match what() {
            Err(cause)
                if cause.raw_os_error() == Some(libc::EBUSY) && Instant::now() + pause < until =>
            {
                std::thread::sleep(pause);
                pause *= 2;
            }
            done => return done,
        }
    }
}

fn promiscuous(config: &AfXdpConfig, link: Link) -> Result<Option<packet::Socket>, SourceError> {
    if !config.promiscuous || link.hardware != libc::ARPHRD_ETHER {
        return Ok(None);
    }
    // A packet socket that is not bound receives nothing.
    let socket = packet::Socket::open();
    let set = socket.and_then(|socket| socket.set_promiscuous(link.index).map(|()| socket));
    match set {
        Ok(socket) => Ok(Some(socket)),
        Err(cause) => {
            let what = format!(
                "cannot enter promiscuous mode on interface {:?}",
                config.interface
            );
            Err(SourceError::io(what, cause))
        }
    }
}

/// The receive queues that are asked for, or all; and how many there are.
fn queues(config: &AfXdpConfig, link: Link) -> Result<(Vec<u32>, u32), Unfit> {
    let name = &config.interface;
    let socket = any_socket().map_err(Unfit::other)?;
    let count = match interface::receive_queues(&socket, name) {
        Some(count) => count,
        None => netlink::xdp_state(link.index).map_or(1, |state| state.made_queues.max(1)),
    };
    if let Some(&queue) = config.queues.iter().find(|&&queue| queue >= count) {
        return Err(Unfit::other(fault::no_queue(name, queue, count)));
    }
    match config.queues.is_empty() {
        false => Ok((config.queues.clone(), count)),
        true if count > MAX_QUEUES => {
            let what = format!(
                "interface {name:?} has {count} receive queues, more than {MAX_QUEUES}; name some \
                 with queues=, or have fewer: ethtool -L {name}"
            );
            Err(Unfit::xdp(SourceError::new(what)))
        }
        true => Ok(((0..count).collect(), count)),
    }
}

/// Asks about an interface by name.
fn link(name: &str) -> Result<Link, SourceError> {
    let socket = any_socket()?;
    let link = interface::link(&socket, name).map_err(|cause| match cause.raw_os_error() {
        Some(libc::ENODEV | libc::ENXIO) => SourceError::new(format!(
            "no interface {name:?} here; list them with: ip link"
        )),
        _ => SourceError::io(format!("cannot ask about interface {name:?}"), cause),
    })?;
    if !is_capturable(link.hardware) {
        let what =
            format!("interface {name:?} is not Ethernet; XDP sources are for Ethernet alone");
        return Err(SourceError::new(what));
    }
    Ok(link)
}

/// A socket of the calling thread's network namespace, to ask about interfaces.
pub(super) fn any_socket() -> Result<OwnedFd, SourceError> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
        .map_err(|cause| SourceError::io("cannot ask about interfaces", cause))
}

/// Packet memory is locked memory, and the limit counts when the daemon has given up its
/// privileges.
fn raise_locked_memory() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    if setrlimit(Resource::Memlock, unlimited).is_err() {
        let mut limit = getrlimit(Resource::Memlock);
        limit.current = limit.maximum;
        // If even that fails, opening a socket says what is short.
        let _ = setrlimit(Resource::Memlock, limit);
    }
}

fn say_pages(bytes: u64, huge: bool) {
    let pages = if huge { "huge" } else { "small" };
    let kib = bytes >> 10;
    log::debug!(target: "source", "packet memory of {kib} KiB in {pages} pages");
}

/// Chunks of a queue to send from, a power of two.
const TRANSMIT_CHUNKS: u32 = 512;
/// Frames that one busy poll may bring.
const BUSY_POLL_BUDGET: u16 = 64;
/// How long one of our programs may take to leave the interface after its process ended.
const ATTACH_PATIENCE: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_binding_is_tried_first() {
        let ways = |mode, hook, frags, fits| -> Vec<(bool, bool)> {
            let ways = bindings(mode, hook, frags, fits);
            ways.iter().map(|way| (way.zero_copy, way.frags)).collect()
        };
        let (native, generic) = (Hook::Native, Hook::Generic);
        assert_eq!(
            ways(Mode::Auto, native, true, true),
            [(true, true), (true, false), (false, true), (false, false)]
        );
        assert_eq!(ways(Mode::Auto, generic, true, false), [(false, true)]);
        assert_eq!(ways(Mode::ZeroCopy, native, false, true), [(true, false)]);
        assert_eq!(ways(Mode::Native, native, false, false), []);
    }
}
