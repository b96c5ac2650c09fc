//! A program's end of a channel.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use vnplug_ring::control::backend::{BackendInfo, Connect, Connected};
use vnplug_ring::control::{Backend, Message, REVOKED_CHANNEL};

use super::credit::Credit;
use super::shared::SharedMemory;
use super::{ANSWER_LIMIT, RETRY, deadline, wait};
use crate::connection::{Connection, socket_path, unexpected};
use crate::error::Error;

/// How to open a [`Channel`].
#[derive(Debug, Clone)]
pub struct ChannelOptions {
    request: Connect,
    socket: Option<PathBuf>,
}

/// What happened, from a program's view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// The back-end says this.
    Message(Vec<u8>),
    /// An event happened again.
    Event {
        /// Its number.
        event: u8,
        /// How often.
        count: u64,
    },
    /// There is memory: [`Channel::memory`].
    Shared {
        /// Its number.
        region: u32,
    },
    /// The back-end wants its memory back: be done with it, then [`Channel::release`]. After this time it is
    /// emptied anyway.
    Withdraw {
        /// Its number.
        region: u32,
        /// How long there is.
        within: Duration,
    },
    /// The back-end, the daemon or the host is gone, or ended the channel. What was shared are zeros now. The
    /// channel is opened again by itself, as soon as that can be; then comes [`Back`](Self::Back). If an operator
    /// revoked it, it is not: the next call says [`Error::Gone`].
    Gone(String),
    /// The channel is open again: a new one, of which the back-end knows nothing.
    Back,
}

/// A channel to a back-end, opened again by itself unless an operator revoked it.
#[derive(Debug)]
pub struct Channel {
    options: ChannelOptions,
    link: Option<Link>,
    /// What happened and was not told.
    news: VecDeque<Told>,
    memory: BTreeMap<u32, Piece>,
    /// It is not opened again.
    is_revoked: bool,
    retry_at: Instant,
    /// Stands in for the connection while there is none, for who polls: it is never ready.
    idle: OwnedFd,
}

/// Memory, and what the daemon calls it: nothing any more, of a channel that is gone.
#[derive(Debug)]
struct Piece {
    memory: SharedMemory,
    host: Option<u32>,
}

/// An open channel.
#[derive(Debug)]
struct Link {
    connection: Connection,
    connected: Connected,
    credit: Credit,
}

impl ChannelOptions {
    /// To the back-end of this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            request: Connect {
                id: 0,
                name: name.into(),
                version: 0,
                label: String::new(),
            },
            socket: None,
        }
    }

    /// To the back-end of this number, whatever it is called.
    #[must_use]
    pub fn by_id(id: u32) -> Self {
        let mut options = Self::new("");
        options.request.id = id;
        options
    }

    /// What this program speaks; the back-end is told.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.request.version = version;
        self
    }

    /// What this program calls itself; the back-end is told at most 64 characters.
    #[must_use]
    pub fn label(mut self, label: &str) -> Self {
        self.request.label = label.into();
        self
    }

    /// The socket of the daemon or agent, in place of `$VNPLUG_SOCKET` or the default one.
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Opens it.
    ///
    /// # Errors
    /// [`Error::Refused`] with `NOT_FOUND` (no such back-end for this program), `UNAVAILABLE` (nobody is it
    /// now), `LIMIT`; those of connecting.
    pub fn open(self) -> Result<Channel, Error> {
        let link = Link::open(&self)?;
        Channel::with(self, Some(link))
    }

    /// As [`open`](Self::open), but waits for a daemon, or a back-end, that is not there yet:
    /// [`Told::Back`] says when it is.
    ///
    /// # Errors
    /// Those that time does not heal.
    pub fn open_when_there(self) -> Result<Channel, Error> {
        match Link::open(&self) {
            Ok(link) => Channel::with(self, Some(link)),
            Err(error) if error.heals() => Channel::with(self, None),
            Err(error) => Err(error),
        }
    }
}

impl Link {
    fn open(options: &ChannelOptions) -> Result<Self, Error> {
        let path = socket_path(options.socket.as_deref());
        let mut connection = Connection::open(&path, ANSWER_LIMIT)?;
        let request = Message::Backend(Backend::Connect(options.request.clone()));
        let connected = match connection.exchange(&request, None)? {
            Message::Backend(Backend::Connected(connected)) => connected,
            other => return Err(unexpected(&other)),
        };
        let credit = Credit::new(connected.channel, connected.events_in, connected.events_out);
        Ok(Self {
            connection,
            connected,
            credit,
        })
    }

    fn tell(&mut self, what: Backend) -> Result<(), Error> {
        self.connection.tell(&Message::Backend(what))
    }
}

impl Channel {
    /// Opens a channel to the back-end of this name.
    ///
    /// # Errors
    /// Those of [`ChannelOptions::open`].
    pub fn open(name: &str) -> Result<Self, Error> {
        ChannelOptions::new(name).open()
    }

    /// The back-ends that may be used from here.
    ///
    /// # Errors
    /// Those of any request.
    pub fn list() -> Result<Vec<BackendInfo>, Error> {
        Self::list_of(None)
    }

    /// As [`list`](Self::list), of the daemon or agent at this socket.
    ///
    /// # Errors
    /// Those of any request.
    pub fn list_of(socket: Option<&std::path::Path>) -> Result<Vec<BackendInfo>, Error> {
        let mut connection = Connection::open(&socket_path(socket), ANSWER_LIMIT)?;
        match connection.exchange(&Message::Backend(Backend::List), None)? {
            Message::Backend(Backend::Listed(all)) => Ok(all),
            other => Err(unexpected(&other)),
        }
    }

    fn with(options: ChannelOptions, link: Option<Link>) -> Result<Self, Error> {
        use rustix::event::{EventfdFlags, eventfd};
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let idle = eventfd(0, flags).map_err(Error::system("cannot make an eventfd"))?;
        Ok(Self {
            options,
            link,
            news: VecDeque::new(),
            memory: BTreeMap::new(),
            is_revoked: false,
            retry_at: Instant::now() + RETRY,
            idle,
        })
    }

    /// Whether it is open now.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.link.is_some()
    }

    /// The back-end's number, name, version and events, while it is open.
    #[must_use]
    pub fn peer(&self) -> Option<&Connected> {
        self.link.as_ref().map(|link| &link.connected)
    }

    /// What happened next; waits for it at most `limit` (`None`: for ever). `Ok(None)`: nothing until then.
    ///
    /// # Errors
    /// What time does not heal: [`Error::Gone`], an operator revoked the channel; the grant is gone, or the other
    /// side speaks nonsense.
    pub fn next(&mut self, limit: Option<Duration>) -> Result<Option<Told>, Error> {
        let until = deadline(limit);
        loop {
            if let Some(told) = self.news.pop_front() {
                self.took(&told);
                return Ok(Some(told));
            }
            let Some(link) = &mut self.link else {
                match self.reopen(until)? {
                    true => continue,
                    false => return Ok(None),
                }
            };
            match link.connection.unasked() {
                Ok(Some(message)) => self.hear(message)?,
                Ok(None) => match wait(&link.connection, until) {
                    Ok(true) => {}
                    Ok(false) => return Ok(None),
                    Err(error) => self.lose(&error.to_string()),
                },
                Err(error) => self.lose(&error.to_string()),
            }
        }
    }

    /// Says something to the back-end.
    ///
    /// # Errors
    /// [`Error::Full`]: take what happened by [`next`](Self::next), then try again. [`Error::Disconnected`]:
    /// it is not open now. [`Error::Gone`]: an operator revoked it. [`Error::Invalid`]: more than 65,536 bytes.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.catch_up();
        let link = self.open_link()?;
        let said = link.credit.say(bytes)?;
        self.tell(said)
    }

    /// An event happened `count` times.
    ///
    /// # Errors
    /// [`Error::Disconnected`], [`Error::Gone`], [`Error::Invalid`]: the back-end does not have it.
    pub fn event(&mut self, event: u8, count: u64) -> Result<(), Error> {
        let link = self.open_link()?;
        let happened = link.credit.event(event, count)?;
        self.tell(happened)
    }

    /// Memory that is shared, or was.
    #[must_use]
    pub fn memory(&self, region: u32) -> Option<&SharedMemory> {
        self.memory.get(&region).map(|piece| &piece.memory)
    }

    /// The memory that is shared, or was and is not released.
    pub fn regions(&self) -> impl Iterator<Item = u32> {
        self.memory.keys().copied()
    }

    /// Lets go of memory, and unmaps it.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is none of this number.
    pub fn release(&mut self, region: u32) -> Result<(), Error> {
        let piece = self.memory.remove(&region);
        let piece = piece.ok_or(Error::Invalid("no shared memory has this number"))?;
        let host = piece.host;
        drop(piece);
        if let Some(host) = host {
            self.let_go(host);
        }
        Ok(())
    }

    /// Tells the daemon that nothing here maps this memory.
    fn let_go(&mut self, region: u32) {
        let Some(link) = &self.link else {
            return;
        };
        let channel = link.connected.channel;
        // If the daemon is gone, so is what it would be told.
        let _ = self.tell(Backend::Withdraw {
            channel,
            region,
            within_ms: 0,
        });
    }

    /// Adds to what was not told yet, if anything.
    fn happened(&mut self, event: u8, count: u64) {
        let waits = self.news.iter_mut().find_map(|told| match told {
            Told::Event { event: same, count } if *same == event => Some(count),
            _ => None,
        });
        match waits {
            Some(waits) => *waits += count,
            None => self.news.push_back(Told::Event { event, count }),
        }
    }

    /// Reads what came, as far as it is credit.
    fn catch_up(&mut self) {
        while let Some(link) = &mut self.link {
            match link.connection.unasked() {
                Ok(Some(message)) => {
                    if let Err(error) = self.hear(message) {
                        self.lose(&error.to_string());
                    }
                }
                Ok(None) => return,
                Err(error) => self.lose(&error.to_string()),
            }
        }
    }

    fn hear(&mut self, message: Message) -> Result<(), Error> {
        let Some(link) = &mut self.link else {
            return Ok(());
        };
        let Message::Backend(said) = message else {
            return Ok(());
        };
        match said {
            Backend::Say { bytes, .. } => self.news.push_back(Told::Message(bytes)),
            Backend::Took { cost, .. } => link.credit.may_say_more(cost),
            Backend::Events { totals, .. } => {
                for (event, count) in link.credit.happened(&totals) {
                    self.happened(event, count);
                }
            }
            Backend::Mapped(mapped) => {
                let fd = link.connection.take_shared();
                let fd = fd.ok_or_else(|| Error::Protocol("memory without a descriptor".into()))?;
                let region = mapped.region;
                match SharedMemory::map(fd.as_fd(), &mapped, mapped.writable) {
                    // A pointer may look at what is called so already, of a channel that is gone.
                    Ok(_) if self.memory.contains_key(&region) => {
                        log::warn!("memory of a back-end has the number of another: {region}");
                        self.let_go(region);
                    }
                    Ok(memory) => {
                        let host = Some(region);
                        self.memory.insert(region, Piece { memory, host });
                        self.news.push_back(Told::Shared { region });
                    }
                    Err(error) => {
                        log::warn!("memory of a back-end is not mapped: {error}");
                        self.let_go(mapped.region);
                    }
                }
            }
            Backend::Withdraw {
                region, within_ms, ..
            } => {
                let within = Duration::from_millis(within_ms.into());
                let mut own = self.memory.iter();
                if let Some((&region, _)) = own.find(|(_, piece)| piece.host == Some(region)) {
                    self.news.push_back(Told::Withdraw { region, within });
                }
            }
            Backend::Hangup { reason, .. } => {
                self.is_revoked = reason == REVOKED_CHANNEL;
                self.lose(&reason);
            }
            _ => {}
        }
        Ok(())
    }

    fn took(&mut self, told: &Told) {
        if let (Told::Message(bytes), Some(link)) = (told, &mut self.link)
            && let Some(credit) = link.credit.taken(bytes.len())
            // It is over then, which is told next.
            && let Err(error) = link.tell(credit)
        {
            self.lose(&error.to_string());
        }
    }

    fn open_link(&mut self) -> Result<&mut Link, Error> {
        let closed = match self.is_revoked {
            true => Error::Gone(REVOKED_CHANNEL.to_owned()),
            false => Error::Disconnected,
        };
        self.link.as_mut().ok_or(closed)
    }

    fn tell(&mut self, what: Backend) -> Result<(), Error> {
        let link = self.open_link()?;
        let told = link.tell(what);
        if let Err(error) = &told {
            self.lose(&error.to_string());
        }
        told
    }

    fn lose(&mut self, reason: &str) {
        self.link = None;
        self.retry_at = Instant::now() + RETRY;
        for piece in self.memory.values_mut() {
            piece.host = None;
            if let Err(error) = piece.memory.let_go() {
                log::warn!("{error}");
            }
        }
        for told in &self.news {
            if let Told::Shared { region } = told {
                self.memory.remove(region);
            }
        }
        // What was said before is told before; events and memory of what is gone are nobody's.
        self.news.retain(|told| matches!(told, Told::Message(_)));
        self.news.push_back(Told::Gone(reason.to_owned()));
    }

    /// Tries to open it again until then; false if it cannot be.
    fn reopen(&mut self, until: Instant) -> Result<bool, Error> {
        if self.is_revoked {
            return Err(Error::Gone(REVOKED_CHANNEL.to_owned()));
        }
        loop {
            let now = Instant::now();
            let next = self.retry_at.min(until);
            std::thread::sleep(next.saturating_duration_since(now));
            if self.retry_at > until {
                return Ok(false);
            }
            match Link::open(&self.options) {
                Ok(link) => {
                    self.link = Some(link);
                    self.news.push_back(Told::Back);
                    return Ok(true);
                }
                Err(error) if error.heals() => self.retry_at = Instant::now() + RETRY,
                Err(error) => return Err(error),
            }
        }
    }
}

/// For poll: readable when [`Channel::next`] has something to say. While the channel is gone it never is:
/// call `next` now and then. It changes when the channel is opened again.
impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.link {
            Some(link) => link.connection.as_fd(),
            None => self.idle.as_fd(),
        }
    }
}
