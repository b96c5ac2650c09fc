//! A back-end: a process that programs in guests and elsewhere use.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use vnplug_ring::control::backend::Register;
use vnplug_ring::control::{Backend, Message, code};

use super::credit::Credit;
use super::shared::SharedMemory;
use super::{ANSWER_LIMIT, RETRY, deadline, wait};
use crate::client::{commit_limit, done};
use crate::connection::{Connection, socket_path, unexpected};
use crate::error::Error;

/// How to be a [`BackEnd`].
#[derive(Debug, Clone)]
pub struct BackEndOptions {
    request: Register,
    socket: Option<PathBuf>,
}

/// What happened, from a back-end's view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// A program connected: a new channel.
    Joined {
        /// Its number, by which everything else is told.
        channel: u32,
        /// `vm:NAME` or `uid:N`, in the daemon's words.
        who: String,
        /// What the program calls itself. Not to be believed.
        label: String,
        /// What it says that it speaks.
        version: u32,
    },
    /// A program says this.
    Message {
        /// The channel.
        channel: u32,
        /// What.
        bytes: Vec<u8>,
    },
    /// An event happened again.
    Event {
        /// The channel.
        channel: u32,
        /// Its number.
        event: u8,
        /// How often.
        count: u64,
    },
    /// A program let go of memory by itself, or could not map it: it is this back-end's no more.
    Released {
        /// The channel.
        channel: u32,
        /// The region.
        region: u32,
    },
    /// A channel is over, and all memory that was shared there; it reads as zeros.
    Left {
        /// The channel.
        channel: u32,
        /// Why.
        reason: String,
    },
    /// The daemon is gone, after all channels were told to be. The back-end registers again by itself; then
    /// comes [`Back`](Self::Back).
    Gone(String),
    /// The daemon knows the back-end again.
    Back,
}

/// A back-end that is registered, again if need be.
#[derive(Debug)]
pub struct BackEnd {
    options: BackEndOptions,
    connection: Option<Connection>,
    channels: BTreeMap<u32, Open>,
    /// By region, with its channel.
    memory: BTreeMap<u32, (u32, SharedMemory)>,
    news: VecDeque<Heard>,
    retry_at: Instant,
    idle: OwnedFd,
}

/// An open channel.
#[derive(Debug)]
struct Open {
    credit: Credit,
}

impl BackEndOptions {
    /// The number and the name of the operator's grant.
    #[must_use]
    pub fn new(id: u32, name: &str) -> Self {
        Self {
            request: Register {
                id,
                name: name.into(),
                version: 0,
                events_in: 0,
                events_out: 0,
            },
            socket: None,
        }
    }

    /// What it speaks; programs are told.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.request.version = version;
        self
    }

    /// How many events programs may send it, and it them; at most 32 each.
    #[must_use]
    pub fn events(mut self, events_in: u8, events_out: u8) -> Self {
        (self.request.events_in, self.request.events_out) = (events_in, events_out);
        self
    }

    /// The daemon's socket, in place of `$VNPLUG_SOCKET` or the default one.
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Registers it.
    ///
    /// # Errors
    /// [`Error::Refused`] with `DENIED` (no grant), `EXISTS` (another process is it); those of connecting.
    pub fn register(self) -> Result<BackEnd, Error> {
        use rustix::event::{EventfdFlags, eventfd};
        let connection = self.connect()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let idle = eventfd(0, flags).map_err(Error::system("cannot make an eventfd"))?;
        Ok(BackEnd {
            options: self,
            connection: Some(connection),
            channels: BTreeMap::new(),
            memory: BTreeMap::new(),
            news: VecDeque::new(),
            retry_at: Instant::now(),
            idle,
        })
    }

    fn connect(&self) -> Result<Connection, Error> {
        let path = socket_path(self.socket.as_deref());
        let mut connection = Connection::open(&path, ANSWER_LIMIT)?;
        let request = Message::Backend(Backend::Register(self.request.clone()));
        done(&connection.exchange(&request, None)?)?;
        Ok(connection)
    }
}

impl BackEnd {
    /// What happened next; waits for it at most `limit` (`None`: for ever). `Ok(None)`: nothing until then.
    ///
    /// # Errors
    /// What time does not heal: the grant is gone, or the daemon speaks nonsense.
    pub fn next(&mut self, limit: Option<Duration>) -> Result<Option<Heard>, Error> {
        let until = deadline(limit);
        loop {
            if let Some(heard) = self.news.pop_front() {
                self.took(&heard);
                return Ok(Some(heard));
            }
            let Some(connection) = &mut self.connection else {
                match self.register_again(until)? {
                    true => continue,
                    false => return Ok(None),
                }
            };
            match connection.unasked() {
                Ok(Some(message)) => self.hear(message),
                Ok(None) => match wait(connection, until) {
                    Ok(true) => {}
                    Ok(false) => return Ok(None),
                    Err(error) => self.lose(&error.to_string()),
                },
                Err(error) => self.lose(&error.to_string()),
            }
        }
    }

    /// Says something to a program.
    ///
    /// # Errors
    /// [`Error::Full`]: it has not taken what was said before; take what happened by [`next`](Self::next), and
    /// try again. [`Error::Invalid`]: no such channel (any more), or more than 65,536 bytes.
    pub fn send(&mut self, channel: u32, bytes: &[u8]) -> Result<(), Error> {
        self.catch_up();
        let said = self.open(channel)?.credit.say(bytes)?;
        self.tell(said)
    }

    /// An event happened `count` times.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no such channel or event.
    pub fn event(&mut self, channel: u32, event: u8, count: u64) -> Result<(), Error> {
        let happened = self.open(channel)?.credit.event(event, count)?;
        self.tell(happened)
    }

    /// Memory that a program maps, too: `bytes` of zeros, rounded up to whole pages, as much as the grant
    /// permits. With `writable` the program may write it. It is the program's alone and this back-end's:
    /// another channel has another. Its number, for [`memory`](Self::memory).
    ///
    /// # Errors
    /// [`Error::Refused`]: the text says why not; [`Error::Invalid`]: no such channel.
    pub fn share(&mut self, channel: u32, bytes: u64, writable: bool) -> Result<u32, Error> {
        self.open(channel)?;
        let request = Message::Backend(Backend::Region {
            channel,
            bytes,
            writable,
        });
        let limit = ANSWER_LIMIT + commit_limit(bytes);
        let connection = self.connection.as_mut().ok_or(Error::Disconnected)?;
        let answer = connection.exchange_within(limit, &request, None);
        let answer = self.alive(answer)?;
        let Message::Backend(Backend::Mapped(mapped)) = answer else {
            return Err(unexpected(&answer));
        };
        let connection = self.connection.as_mut().ok_or(Error::Disconnected)?;
        let fd = connection.take_all_fds().pop();
        let fd = fd.ok_or_else(|| Error::Protocol("memory without a descriptor".into()))?;
        let memory = SharedMemory::map(fd.as_fd(), &mapped, true)?;
        self.memory.insert(mapped.region, (channel, memory));
        Ok(mapped.region)
    }

    /// Memory that is shared.
    #[must_use]
    pub fn memory(&self, region: u32) -> Option<&SharedMemory> {
        self.memory.get(&region).map(|(_, memory)| memory)
    }

    /// Takes memory back: the program is told and waited for, at most `within` (and a minute). True if it let
    /// go; otherwise what it maps are zeros now. Either way the memory is unmapped here.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is none of this number.
    pub fn withdraw(&mut self, region: u32, within: Duration) -> Result<bool, Error> {
        // As long as the daemon waits at most.
        let within = within.min(Duration::from_secs(60));
        let taken = self.memory.remove(&region);
        let (channel, memory) = taken.ok_or(Error::Invalid("no shared memory has this number"))?;
        drop(memory);
        let request = Message::Backend(Backend::Withdraw {
            channel,
            region,
            within_ms: u32::try_from(within.as_millis()).unwrap_or(u32::MAX),
        });
        let limit = ANSWER_LIMIT + within;
        let connection = self.connection.as_mut().ok_or(Error::Disconnected)?;
        let answer = connection.exchange_within(limit, &request, None);
        match self.alive(answer)? {
            Message::Backend(Backend::Withdrawn { released }) => Ok(released),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends a channel.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no such channel.
    pub fn hang_up(&mut self, channel: u32, reason: &str) -> Result<(), Error> {
        self.open(channel)?;
        self.close(channel);
        self.tell(Backend::Hangup {
            channel,
            reason: reason.into(),
        })
    }

    /// The channels that are open.
    pub fn channels(&self) -> impl Iterator<Item = u32> {
        self.channels.keys().copied()
    }

    fn open(&mut self, channel: u32) -> Result<&mut Open, Error> {
        let open = self.channels.get_mut(&channel);
        open.ok_or(Error::Invalid("a channel that is not open"))
    }

    /// Reads what came, as far as it is credit.
    fn catch_up(&mut self) {
        while let Some(connection) = &mut self.connection {
            match connection.unasked() {
                Ok(Some(message)) => self.hear(message),
                Ok(None) => return,
                Err(error) => self.lose(&error.to_string()),
            }
        }
    }

    fn hear(&mut self, message: Message) {
        let Message::Backend(said) = message else {
            return;
        };
        match said {
            Backend::Joined(joined) => {
                let Register {
                    events_in,
                    events_out,
                    ..
                } = self.options.request;
                let credit = Credit::new(joined.channel, events_out, events_in);
                self.channels.insert(joined.channel, Open { credit });
                self.news.push_back(Heard::Joined {
                    channel: joined.channel,
                    who: joined.who,
                    label: joined.label,
                    version: joined.version,
                });
            }
            Backend::Say { channel, bytes } => {
                self.news.push_back(Heard::Message { channel, bytes });
            }
            Backend::Took { channel, cost } => {
                if let Ok(open) = self.open(channel) {
                    open.credit.may_say_more(cost);
                }
            }
            Backend::Events { channel, totals } => {
                if let Ok(open) = self.open(channel) {
                    for (event, count) in open.credit.happened(&totals) {
                        self.happened(channel, event, count);
                    }
                }
            }
            Backend::Withdraw {
                channel, region, ..
            } => {
                if let Some((_, memory)) = self.memory.get(&region) {
                    empty(memory);
                }
                self.news.push_back(Heard::Released { channel, region });
            }
            Backend::Hangup { channel, reason } if self.channels.contains_key(&channel) => {
                self.channels.remove(&channel);
                let of_it = self.memory.values().filter(|(of, _)| *of == channel);
                of_it.for_each(|(_, memory)| empty(memory));
                self.news.push_back(Heard::Left { channel, reason });
            }
            _ => {}
        }
    }

    /// Adds to what was not told yet, if anything.
    fn happened(&mut self, channel: u32, event: u8, count: u64) {
        let waits = self.news.iter_mut().find_map(|heard| match heard {
            Heard::Event {
                channel: of,
                event: same,
                count,
            } if (*of, *same) == (channel, event) => Some(count),
            _ => None,
        });
        match waits {
            Some(waits) => *waits += count,
            None => self.news.push_back(Heard::Event {
                channel,
                event,
                count,
            }),
        }
    }

    fn took(&mut self, heard: &Heard) {
        match heard {
            // Mapped until it is told that it is over: zeros.
            Heard::Left { channel, .. } => self.close(*channel),
            Heard::Released { region, .. } => drop(self.memory.remove(region)),
            _ => {}
        }
        if let Heard::Message { channel, bytes } = heard
            && let Some(open) = self.channels.get_mut(channel)
            && let Some(credit) = open.credit.taken(bytes.len())
        {
            // If the daemon is gone, that is told next.
            let _ = self.tell(credit);
        }
    }

    fn tell(&mut self, what: Backend) -> Result<(), Error> {
        let connection = self.connection.as_mut().ok_or(Error::Disconnected)?;
        let told = connection.tell(&Message::Backend(what));
        self.alive(told)
    }

    /// Notes an exchange that ended the connection.
    fn alive<T>(&mut self, outcome: Result<T, Error>) -> Result<T, Error> {
        let lives = self.connection.as_ref().is_some_and(Connection::is_alive);
        if let (Err(error), false) = (&outcome, lives) {
            self.lose(&error.to_string());
        }
        outcome
    }

    fn close(&mut self, channel: u32) {
        self.channels.remove(&channel);
        self.memory.retain(|_, (of, _)| *of != channel);
    }

    fn lose(&mut self, reason: &str) {
        if self.connection.take().is_none() {
            return;
        }
        self.retry_at = Instant::now() + RETRY;
        for channel in std::mem::take(&mut self.channels).into_keys() {
            let reason = reason.to_owned();
            self.news.push_back(Heard::Left { channel, reason });
        }
        self.memory.values().for_each(|(_, memory)| empty(memory));
        self.news.push_back(Heard::Gone(reason.to_owned()));
    }

    fn register_again(&mut self, until: Instant) -> Result<bool, Error> {
        loop {
            let next = self.retry_at.min(until);
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            if self.retry_at > until {
                return Ok(false);
            }
            match self.options.connect() {
                Ok(connection) => {
                    self.connection = Some(connection);
                    self.news.push_back(Heard::Back);
                    return Ok(true);
                }
                // Its own old connection may not have ended yet.
                Err(Error::Refused { code, .. }) if code == code::EXISTS => self.retry(),
                Err(error) if error.heals() => self.retry(),
                Err(error) => return Err(error),
            }
        }
    }

    fn retry(&mut self) {
        self.retry_at = Instant::now() + RETRY;
    }
}

/// What a pointer into it may still look at.
fn empty(memory: &SharedMemory) {
    if let Err(error) = memory.let_go() {
        log::warn!("{error}");
    }
}

/// For poll: readable when [`BackEnd::next`] has something to say. While the daemon is gone it never is: call
/// `next` now and then. It changes when the back-end is registered again.
impl AsFd for BackEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.connection {
            Some(connection) => connection.as_fd(),
            None => self.idle.as_fd(),
        }
    }
}
