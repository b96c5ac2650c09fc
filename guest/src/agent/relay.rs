//! What the agent does with each message, from applications and from the host.

use std::collections::{BTreeSet, HashSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType, send, shutdown, socketpair,
};
use vnplug_ring::control::{
    ArenaHome, Backend, Header, Message, Opened, RingPlace, Role, VERSION, code,
};

use super::app::{Hangup, receive};
use super::backend::ChannelEntry;
use super::closer::{Closer, PeerFd};
use super::doorbell::Line;
use super::phase::{LOCKED_DOWN, Phase};
use super::places::{MAX_NAMED, coalesce, places_of};
use super::plugged::{self, Missing};
use super::serve::Agent;
use crate::error::Error;

/// An open port of an application.
#[derive(Debug)]
pub(super) struct PortEntry {
    app: u32,
    wake: Wake,
    places: Vec<RingPlace>,
    /// Our end of the socket by which its application kicks the host, if it sends.
    kick: Option<PeerFd>,
}

/// How the reader of a port is woken.
#[derive(Debug)]
enum Wake {
    /// By us, when the host says so: our end of its socket, which is shut for reading. A pipe would
    /// stop us while its reader copies into memory that faults for ever.
    Socket(PeerFd),
    /// By a vector of the doorbell, past us.
    Vector(#[expect(dead_code, reason = "it is silenced when dropped")] Line),
    /// By us, every few milliseconds: the host rings a vector that we do not hear.
    Blind(PeerFd),
}

/// A relayed request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pending {
    pub(super) app: u32,
    /// The application's own number for it.
    pub(super) id: u32,
    /// The port it closes, if it closes one.
    closes: Option<u32>,
}

impl Agent {
    /// A request of an application.
    pub(super) fn app_says(&mut self, app: u32, id: u32, request: Message) -> Result<(), Hangup> {
        let greeted = self.apps.get(&app).is_some_and(|app| app.greeted);
        match request {
            Message::Hello {
                min_version,
                max_version,
                role,
                name,
                ..
            } if !greeted => {
                if role != Role::Client || !(min_version..=max_version).contains(&VERSION) {
                    self.refuse(app, id, code::PROTOCOL, "applications and version 1 only")?;
                    return Err(Hangup("an impossible greeting".into()));
                }
                log::debug!("application {app} is {:?}", name);
                if let Some(app) = self.apps.get_mut(&app) {
                    app.greeted = true;
                }
                let server = format!("vnplug agent {}", env!("CARGO_PKG_VERSION"));
                let welcome = Message::Welcome {
                    version: VERSION,
                    server,
                    pool_id: 0,
                };
                self.answer(app, id, &welcome, Vec::new())
            }
            Message::List
            | Message::Open(_)
            | Message::Filter { .. }
            | Message::Tune { .. }
            | Message::Lend { .. }
            | Message::AddRules { .. }
            | Message::RemoveRule { .. }
            | Message::RuleDefault { .. }
            | Message::PurgeRules { .. }
            | Message::RuleStats { .. }
            | Message::Note { .. }
            | Message::Stats { .. }
            | Message::Programs(_)
            | Message::Close { .. }
                if greeted =>
            {
                self.relay(app, id, &request)
            }
            Message::Backend(said) if greeted => self.say_to_back_end(app, id, said),
            Message::AttachVm(_)
            | Message::DetachVm { .. }
            | Message::HoldVm { .. }
            | Message::Adopt { .. }
                if greeted =>
            {
                let text = "only on the host: a guest may not attach virtual machines";
                self.refuse(app, id, code::DENIED, text)
            }
            Message::Switch(_) | Message::Revoke(_) | Message::Grants(_) | Message::Sources(_)
                if greeted =>
            {
                let text =
                    "only on the host: a guest may not manage sources, switches, ports and grants";
                self.refuse(app, id, code::DENIED, text)
            }
            _ => {
                self.refuse(app, id, code::PROTOCOL, "this message does not belong here")?;
                Err(Hangup(format!("a message of kind {}", request.kind())))
            }
        }
    }

    /// A message of the host.
    pub(super) fn host_says(&mut self, header: &Header, message: Message) {
        // Whatever it says, it lives; it may be slow because somebody asks it too much.
        self.missed = 0;
        if header.id == 0 {
            return self.unasked(message);
        }
        if header.id == self.hello_id {
            return self.welcomed(message);
        }
        if let Some(at) = self.probes.iter().position(|&probe| probe == header.id) {
            self.probes.drain(..=at);
            if matches!(message, Message::Error { .. }) {
                log::info!("the host does not know us any more");
                self.lose("the host restarted");
                self.greet();
            }
            return;
        }
        let Some(pending) = self.pending.remove(&header.id) else {
            // The application died meanwhile; AppGone closed the port, nobody mapped it.
            if let Message::Opened(opened) = message {
                self.release(places_of(&opened));
            }
            return;
        };
        if let Some(app) = self.apps.get_mut(&pending.app) {
            app.pending -= 1;
        }
        let sent = match message {
            Message::Opened(opened) => self.opened(pending, opened),
            Message::Backend(Backend::Connected(connected)) => {
                self.connected(pending.app, pending.id, connected)
            }
            message => {
                if let (Message::Done, Some(port)) = (&message, pending.closes)
                    && let Some(entry) = self.ports.remove(&port)
                {
                    self.release(entry.places);
                }
                self.answer(pending.app, pending.id, &message, Vec::new())
            }
        };
        match sent {
            Ok(()) => self.serve_requests(pending.app),
            Err(hangup) => self.drop_app(pending.app, &hangup),
        }
    }

    /// Ends every port and answers what is pending: the host does not know them any more.
    pub(super) fn lose(&mut self, reason: &str) {
        let mut hangups = Vec::new();
        let mut answered = BTreeSet::new();
        for pending in std::mem::take(&mut self.pending).into_values() {
            answered.insert(pending.app);
            if let Some(app) = self.apps.get_mut(&pending.app) {
                app.pending -= 1;
            }
            if let Err(hangup) = self.refuse(pending.app, pending.id, code::UNAVAILABLE, reason) {
                hangups.push((pending.app, hangup));
            }
        }
        self.lose_awaited(reason, &mut hangups);
        for (port, entry) in std::mem::take(&mut self.ports) {
            let app = entry.app;
            if let Err(hangup) = self.gone(port, entry, reason.into()) {
                hangups.push((app, hangup));
            }
        }
        self.lose_channels(reason, &mut hangups);
        for (app, hangup) in hangups {
            self.drop_app(app, &hangup);
        }
        self.held_back.append(&mut answered);
    }

    /// The application is gone: its ports close and its places are free.
    pub(super) fn drop_app(&mut self, number: u32, why: &Hangup) {
        let Some(app) = self.apps.remove(&number) else {
            return;
        };
        // Another thread closes it, at some time.
        self.unwatch(&app);
        log::debug!("application {number}: {}", why.0);
        let mut places = app.mapped;
        self.ports.retain(|_, entry| {
            if entry.app == number {
                places.append(&mut entry.places);
            }
            entry.app != number
        });
        self.pending.retain(|_, pending| pending.app != number);
        places.append(&mut self.forget_awaited(number));
        places.append(&mut self.forget_channels(number));
        // It would come after whatever waits, and there is nothing to close.
        if app.asked_for_port && self.phase == Phase::Up {
            self.say(&Message::AppGone, 0, number);
        }
        self.release(places);
    }

    /// When the readers of blind ports are to be woken again; `None`: there are none.
    pub(super) fn wake_blind(&mut self, now: Instant) -> Option<Instant> {
        let blind = self.ports.values().filter_map(|entry| match &entry.wake {
            Wake::Blind(bell) => Some(bell),
            _ => None,
        });
        let mut blind = blind.peekable();
        blind.peek()?;
        if now >= self.blind_at {
            self.blind_at = now + BLIND;
            blind.for_each(ring);
        }
        Some(self.blind_at)
    }

    /// Places of rings that applications may map, as many as a message takes.
    pub(super) fn live(&self) -> Vec<RingPlace> {
        let of_ports = self.ports.values().flat_map(|entry| &entry.places);
        let of_apps = self.apps.values().flat_map(|app| &app.mapped);
        let of_channels = self.channels.values().flat_map(ChannelEntry::places);
        let all = of_ports.chain(of_apps).chain(of_channels);
        coalesce(all.copied().collect(), MAX_NAMED)
    }

    /// So much waits for the host that nothing is added that can be left out.
    pub(super) fn is_clogged(&self) -> bool {
        let backlog = self.channel.as_ref().map_or(0, |channel| channel.backlog());
        backlog > MAX_BACKLOG
    }

    pub(super) fn relay(&mut self, app: u32, id: u32, request: &Message) -> Result<(), Hangup> {
        if self.phase != Phase::Up {
            let text = match self.is_locked_down {
                true => LOCKED_DOWN,
                false => "the host cannot be reached at this moment",
            };
            return self.refuse(app, id, code::UNAVAILABLE, text);
        }
        if self.is_clogged() {
            return self.refuse(app, id, code::LIMIT, "too many requests at once");
        }
        let Some(entry) = self.apps.get_mut(&app) else {
            return Ok(());
        };
        entry.pending += 1;
        let keeps =
            |it: &Message| matches!(it, Message::Open(_) | Message::Backend(Backend::Connect(_)));
        entry.asked_for_port |= keeps(request);
        let number = self.next_id();
        let closes = match request {
            // Somebody else's port is not ours to forget; the host refuses to close it.
            Message::Close { port } => Some(*port)
                .filter(|port| self.ports.get(port).is_some_and(|entry| entry.app == app)),
            _ => None,
        };
        self.pending.insert(number, Pending { app, id, closes });
        self.say(request, number, app);
        Ok(())
    }

    /// A port is open; its application gets it when its memory is there.
    fn opened(&mut self, pending: Pending, opened: Opened) -> Result<(), Hangup> {
        let found = plugged::memory_of(&self.pools, &mut self.handed, &opened);
        self.opened_with(pending, opened, found)
    }

    /// As [`opened`](Self::opened), with its memory and its arenas, or what is missing.
    pub(super) fn opened_with(
        &mut self,
        pending: Pending,
        mut opened: Opened,
        found: Result<(Option<OwnedFd>, Option<OwnedFd>), Missing>,
    ) -> Result<(), Hangup> {
        let Pending { app, id, .. } = pending;
        let (memory, arenas) = match found {
            Ok(found) => found,
            Err(Missing::Awaited) => {
                self.await_port(pending, opened);
                return Ok(());
            }
            Err(Missing::Group) => {
                let text = "the guest has no device with this group's arenas: is it plugged in, \
                            and has it an address? (dmesg says why not)";
                return self.give_up(pending, &opened, code::UNAVAILABLE, text);
            }
        };
        let places = places_of(&opened);
        // Which device it is does not matter to who has its descriptor.
        opened.memory = 0;
        if opened.arenas.home == ArenaHome::Plugged {
            opened.arenas.home = ArenaHome::Apart;
        }
        let closer = self.apps.get(&app).map(|app| app.closer().clone());
        let closer = closer.unwrap_or_default();
        let kicks = self.kicks(&opened, &closer);
        let (Some(memory), Ok((reader, wake)), Ok((kick, kicker))) =
            (memory, self.wake(&opened, &closer), kicks)
        else {
            log::warn!("no descriptors left for a port of application {app}");
            let text = "the agent is out of descriptors";
            return self.give_up(pending, &opened, code::LIMIT, text);
        };
        let entry = PortEntry {
            app,
            wake,
            places,
            kick,
        };
        self.ports.insert(opened.port, entry);
        let fds = [memory, reader].into_iter().chain(kicker).chain(arenas);
        self.answer(app, id, &Message::Opened(opened), fds.collect())
    }

    /// Closes a port that its application cannot get.
    pub(super) fn give_up(
        &mut self,
        pending: Pending,
        opened: &Opened,
        code: u16,
        text: &str,
    ) -> Result<(), Hangup> {
        let close = Message::Close { port: opened.port };
        let number = self.next_id();
        self.say(&close, number, pending.app);
        self.release(places_of(opened));
        self.refuse(pending.app, pending.id, code, text)
    }

    /// The socket by which an application kicks: our end, which is listened to, and its own.
    fn kicks(
        &self,
        opened: &Opened,
        closer: &Closer,
    ) -> Result<(Option<PeerFd>, Option<OwnedFd>), Error> {
        if opened.transmit.len == 0 {
            return Ok((None, None));
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(Error::system("cannot make a socket for kicks"))?;
        let ours = PeerFd::new(ours, closer.clone());
        self.watch_kick(&ours, opened.port)?;
        Ok((Some(ours), Some(theirs)))
    }

    /// An application kicks: frames wait in the transmit ring of its port. The host is told once per
    /// turn, and not before it has read what waits for it already.
    pub(super) fn kicked(&mut self, port: u32) {
        let entry = self.ports.get(&port);
        let Some(kick) = entry.and_then(|entry| entry.kick.as_ref()) else {
            return;
        };
        // Nothing at all: the application closed its end, which would be ready for ever. Descriptors:
        // they stay there, and nobody listens any more.
        if matches!(receive(kick, &mut [0; 256]), Ok(Some(0) | None)) {
            self.unwatch(kick);
        }
        self.kicks_owed.insert(port);
    }

    /// Tells the host of ports that were kicked.
    pub(super) fn relay_kicks(&mut self) {
        if self.phase == Phase::Up && !self.kicks_owed.is_empty() && !self.is_clogged() {
            let owed = std::mem::take(&mut self.kicks_owed).into_iter();
            let ports: Vec<u32> = owed.filter(|port| self.ports.contains_key(port)).collect();
            for ports in ports.chunks(MAX_NAMED) {
                self.say(&Message::Kick(ports.to_vec()), 0, 0);
            }
        }
    }

    /// The descriptor that wakes a reader, and our part in that.
    fn wake(&self, opened: &Opened, closer: &Closer) -> Result<(OwnedFd, Wake), Errno> {
        if opened.vector != u32::MAX {
            let doorbell = self.doorbell.as_ref();
            match doorbell.map(|doorbell| doorbell.listen(opened.vector)) {
                Some(Ok((event, line))) => {
                    log::debug!("vector {} wakes port {}", opened.vector, opened.port);
                    return Ok((event, Wake::Vector(line)));
                }
                Some(Err(errno)) => log::warn!("vector {}: {errno}", opened.vector),
                None => {}
            }
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (bell, reader) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        shutdown(&bell, Shutdown::Read)?;
        let bell = PeerFd::new(bell, closer.clone());
        if opened.vector == u32::MAX {
            return Ok((reader, Wake::Socket(bell)));
        }
        log::warn!(
            "the host wakes port {} by a vector that this agent does not hear: its reader is \
             woken every {} ms",
            opened.port,
            BLIND.as_millis()
        );
        Ok((reader, Wake::Blind(bell)))
    }

    fn unasked(&mut self, message: Message) {
        match message {
            Message::Wake(ports) => {
                for port in ports {
                    if let Some(PortEntry {
                        wake: Wake::Socket(bell),
                        ..
                    }) = self.ports.get(&port)
                    {
                        ring(bell);
                    }
                }
            }
            Message::Backend(said) => self.of_back_end(said),
            Message::Gone { port: 0, .. } => self.is_stranger(),
            Message::Gone { port, reason } => {
                self.end_awaited(port, &reason);
                if let Some(entry) = self.ports.remove(&port) {
                    let app = entry.app;
                    if let Err(hangup) = self.gone(port, entry, reason) {
                        self.drop_app(app, &hangup);
                    }
                }
            }
            other => log::debug!("the host says something of kind {}", other.kind()),
        }
    }

    fn gone(&mut self, port: u32, entry: PortEntry, reason: String) -> Result<(), Hangup> {
        if let Some(app) = self.apps.get_mut(&entry.app) {
            app.mapped.extend(entry.places);
            if app.mapped.len() > MAX_MAPPED {
                return Err(Hangup("it lost too many ports: connect again".into()));
            }
        }
        // The message comes before the end of the doorbell, which closes here.
        self.answer(entry.app, 0, &Message::Gone { port, reason }, Vec::new())
    }

    /// Tells the host that nobody maps these places any more.
    pub(super) fn release(&mut self, mut places: Vec<RingPlace>) {
        // The arenas of a group are mapped until its last reader is gone.
        let mapped: HashSet<(u64, u64)> = self
            .ports
            .values()
            .flat_map(|entry| &entry.places)
            .chain(self.apps.values().flat_map(|app| &app.mapped))
            .map(|place| (place.offset, place.len))
            .collect();
        places.retain(|place| !mapped.contains(&(place.offset, place.len)));
        // A host that has not heard a Hello yet has no places to keep.
        if matches!(self.phase, Phase::Up | Phase::Greeting) {
            for places in places.chunks(MAX_NAMED) {
                self.say(&Message::Release(places.to_vec()), 0, 0);
            }
        }
    }

    pub(super) fn refuse(
        &mut self,
        app: u32,
        id: u32,
        code: u16,
        text: &str,
    ) -> Result<(), Hangup> {
        let text = text.into();
        self.answer(app, id, &Message::Error { code, text }, Vec::new())
    }

    pub(super) fn answer(
        &mut self,
        app: u32,
        id: u32,
        message: &Message,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Hangup> {
        let Some(entry) = self.apps.get_mut(&app) else {
            return Ok(());
        };
        let sent = entry.send(message, id, fds);
        self.watch_app(app);
        sent
    }
}

/// Wakes a reader; a full buffer has woken it already.
fn ring(bell: &PeerFd) {
    match send(bell, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(_) | Err(Errno::AGAIN | Errno::PIPE) => {}
        Err(errno) => log::debug!("cannot ring: {errno}"),
    }
}

/// How late a reader may be that the host wakes by a vector we do not hear.
const BLIND: Duration = Duration::from_millis(10);
/// Bytes that may wait for the host to read them.
const MAX_BACKLOG: usize = 256 << 10;
/// Places of closed ports that an application may keep.
const MAX_MAPPED: usize = 512;
