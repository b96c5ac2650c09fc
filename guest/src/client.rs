//! Everything an application may ask for that is not a port.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use vnplug_ring::control::{
    Counted, Device, GrantAction, GrantKind, GrantRequest, Grow, Message, ProgramChange,
    ProgramInfo, Programs, Revoke, SourceRequest, SwitchAsk, SwitchRequest, VmReady, VmSpec,
};

use crate::connection::{Connection, socket_path, unexpected};
use crate::error::Error;

/// A connection for questions and for the operator's requests.
///
/// Not for packets: a [`Port`](crate::Port) has a connection of its own.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    path: PathBuf,
}

impl Client {
    /// Connects to `$VNPLUG_SOCKET`, or else to the default socket.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Permission`], [`Error::Version`].
    pub fn connect() -> Result<Self, Error> {
        Self::connect_to(&socket_path(None))
    }

    /// As [`connect`](Self::connect), for who has little patience: no answer, of this connection either,
    /// may take longer than `limit`.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and [`Error::TimedOut`].
    pub fn connect_within(limit: Duration) -> Result<Self, Error> {
        Self::connect_to_within(&socket_path(None), limit)
    }

    /// As [`connect_within`](Self::connect_within), to the socket at `path`.
    ///
    /// # Errors
    /// As [`connect_within`](Self::connect_within).
    pub fn connect_to_within(path: &Path, limit: Duration) -> Result<Self, Error> {
        let connection = Connection::open(path, limit)?;
        Ok(Self {
            connection,
            path: path.to_owned(),
        })
    }

    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_to(path: &Path) -> Result<Self, Error> {
        Self::connect_to_within(path, ANSWER_LIMIT)
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Name and version of the daemon or agent, in its own words (escape before printing).
    pub fn server(&self) -> &str {
        self.connection.server()
    }

    /// The user that the daemon is now: the files that it names are to be this user's before somebody of more rights
    /// changes them.
    ///
    /// # Errors
    /// Those of any request; the kernel does not say.
    pub fn server_user(&mut self) -> Result<u32, Error> {
        self.connection.server_user()
    }

    /// The sources that may be opened.
    ///
    /// # Errors
    /// Those of any request: [`Error::Refused`], [`Error::Disconnected`], [`Error::TimedOut`].
    pub fn devices(&mut self) -> Result<Vec<Device>, Error> {
        match self.connection.exchange(&Message::List, None)? {
            Message::Devices(devices) => Ok(devices),
            other => Err(unexpected(&other)),
        }
    }

    /// All counters this client may see.
    ///
    /// # Errors
    /// Those of any request.
    pub fn stats(&mut self) -> Result<Vec<Counted>, Error> {
        match self
            .connection
            .exchange(&Message::Stats { port: 0 }, None)?
        {
            Message::Counters(counters) => Ok(counters),
            other => Err(unexpected(&other)),
        }
    }

    /// How switches are: each, its ports and, if asked for, its stations, as things of the kinds `switch`,
    /// `switch_port` and `station`. An empty name asks about all switches, port 0 about all ports.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn show_switch(
        &mut self,
        name: &str,
        port: u16,
        stations: bool,
    ) -> Result<Vec<Counted>, Error> {
        let ask = SwitchAsk::Show { stations };
        match self.connection.exchange(&switch(name, port, ask), None)? {
            Message::Counters(counters) => Ok(counters),
            other => Err(unexpected(&other)),
        }
    }

    /// Sets something of a switch (port 0) or of one port: `key=value`, several with blanks between them. If
    /// it is to be kept, a daemon that starts sets it, too.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn set_switch(
        &mut self,
        name: &str,
        port: u16,
        text: &str,
        keep: bool,
    ) -> Result<(), Error> {
        let text = text.to_owned();
        let request = switch(name, port, SwitchAsk::Set { text, keep });
        done(&self.connection.exchange(&request, None)?)
    }

    /// Closes a port of a switch. Its program may come again.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn kick(&mut self, name: &str, port: u16) -> Result<(), Error> {
        let request = switch(name, port, SwitchAsk::Kick);
        done(&self.connection.exchange(&request, None)?)
    }

    /// Takes ports, or one direction of them, from their owners. When it is done, nothing more is received or
    /// sent by them.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn revoke(&mut self, revoke: Revoke) -> Result<(), Error> {
        done(&self.connection.exchange(&Message::Revoke(revoke), None)?)
    }

    /// The grants.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn grants(&mut self) -> Result<Vec<Counted>, Error> {
        let request = Message::Grants(GrantRequest::List);
        match self.connection.exchange(&request, None)? {
            Message::Counters(all) => Ok(all),
            other => Err(unexpected(&other)),
        }
    }

    /// Changes a grant, which is written as on the daemon's command line. When it is done, open ports are
    /// served by it. If it is to be kept, a daemon that starts has it, too.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn change_grant(
        &mut self,
        action: GrantAction,
        kind: GrantKind,
        text: &str,
        keep: bool,
    ) -> Result<(), Error> {
        let text = text.to_owned();
        let request = Message::Grants(GrantRequest::Change {
            action,
            kind,
            text,
            keep,
        });
        done(&self.connection.exchange(&request, None)?)
    }

    /// Changes the sources, or has the daemon read its configuration again; tells what became different, as things of the
    /// kind `change`.
    ///
    /// # Errors
    /// Those of any request; agents refuse it. Nothing is different then.
    pub fn change_sources(&mut self, request: SourceRequest) -> Result<Vec<Counted>, Error> {
        match self.connection.exchange(&Message::Sources(request), None)? {
            Message::Counters(all) => Ok(all),
            other => Err(unexpected(&other)),
        }
    }

    /// The operator's programs that may be used from here.
    ///
    /// # Errors
    /// Those of any request.
    pub fn programs(&mut self) -> Result<Vec<ProgramInfo>, Error> {
        let request = Message::Programs(Programs::List);
        match self.connection.exchange(&request, None)? {
            Message::Programs(Programs::All(all)) => Ok(all),
            other => Err(unexpected(&other)),
        }
    }

    /// Changes the operator's programs. When it is done, no frame is judged by what was there before.
    ///
    /// # Errors
    /// Those of any request; guests are refused. Nothing is different then.
    pub fn change_programs(&mut self, change: ProgramChange) -> Result<(), Error> {
        let request = Message::Programs(Programs::Change(change));
        done(&self.connection.exchange(&request, None)?)
    }

    /// Values of a map of a program, as they lie there at this moment: at most `count` from entry `first` on,
    /// and not more than an answer has room for.
    ///
    /// # Errors
    /// Those of any request.
    pub fn program_map(
        &mut self,
        program: &str,
        map: &str,
        first: u32,
        count: u32,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let request = Message::Programs(Programs::Read {
            program: program.to_owned(),
            map: map.to_owned(),
            first,
            count,
        });
        match self.connection.exchange(&request, None)? {
            Message::Programs(Programs::Values {
                value_bytes, bytes, ..
            }) => {
                let each = value_bytes.max(1) as usize;
                Ok(bytes.chunks_exact(each).map(<[u8]>::to_vec).collect())
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Makes a virtual machine known to the daemon and returns what to plug into it.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn attach_vm(&mut self, spec: VmSpec) -> Result<VmReady, Error> {
        // The pool is committed before the answer comes.
        let limit = ANSWER_LIMIT + commit_limit(spec.pool_bytes);
        let answer = self
            .connection
            .exchange_within(limit, &Message::AttachVm(spec), None);
        match answer? {
            Message::VmReady(ready) => Ok(ready),
            other => Err(unexpected(&other)),
        }
    }

    /// Closes a virtual machine's ports and forgets it.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn detach_vm(&mut self, name: &str) -> Result<(), Error> {
        self.detach_own_vm(name, 0)
    }

    /// As [`detach_vm`](Self::detach_vm), but refused if another [`VmSpec::owner`] attached the
    /// machine meanwhile.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn detach_own_vm(&mut self, name: &str, owner: u64) -> Result<(), Error> {
        let request = Message::DetachVm {
            name: name.into(),
            owner,
        };
        done(&self.connection.exchange(&request, None)?)
    }

    /// Closes a virtual machine's ports and has none opened until it is let go, or attached again. It stays
    /// known, and what it is to be plugged with comes back. `owner` is as in
    /// [`detach_own_vm`](Self::detach_own_vm).
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn hold_vm(&mut self, name: &str, owner: u64, held: bool) -> Result<VmReady, Error> {
        let request = Message::HoldVm {
            name: name.into(),
            owner,
            held,
        };
        match self.connection.exchange(&request, None)? {
            Message::VmReady(ready) => Ok(ready),
            other => Err(unexpected(&other)),
        }
    }

    /// Hands the daemon the control channel of a virtual machine that was attached over this
    /// connection: one end of a socket pair whose other end is the guest's tty (User-mode Linux).
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn adopt(&mut self, name: &str, channel: BorrowedFd<'_>) -> Result<(), Error> {
        let request = Message::Adopt { name: name.into() };
        done(&self.connection.exchange(&request, Some(channel))?)
    }
}

/// Memory for a running VM.
impl Client {
    /// From now on this process plugs devices for the VM, which it attached over this connection, of at most
    /// `most_bytes` in all; [`next_growth`](Self::next_growth) says which. With `apart` each port of the VM
    /// gets a device of its own, and no place in the pool.
    ///
    /// # Errors
    /// Those of any request; agents refuse it.
    pub fn offer_growth(&mut self, name: &str, most_bytes: u64, apart: bool) -> Result<(), Error> {
        let offer = Grow::Offer {
            name: name.to_owned(),
            most_bytes,
            apart,
        };
        done(&self.connection.exchange(&Message::Grow(offer), None)?)
    }

    /// What is to be plugged or taken out next, if anything is now; with the memory to be plugged.
    ///
    /// # Errors
    /// The connection is over.
    pub fn next_growth(&mut self) -> Result<Option<(Grow, Option<OwnedFd>)>, Error> {
        loop {
            match self.connection.unasked()? {
                Some(Message::Grow(what)) => {
                    let plugs = matches!(what, Grow::Plug { .. });
                    let fd = plugs.then(|| self.connection.take_shared()).flatten();
                    return Ok(Some((what, fd)));
                }
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    /// Says what became of it.
    ///
    /// # Errors
    /// The connection is over.
    pub fn tell_growth(&mut self, what: Grow) -> Result<(), Error> {
        self.connection.tell(&Message::Grow(what))
    }
}

/// For poll: readable outside a request means that the other side closed the connection, for it
/// says nothing unasked to a client without ports.
impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

fn switch(name: &str, port: u16, ask: SwitchAsk) -> Message {
    Message::Switch(SwitchRequest {
        name: name.to_owned(),
        port,
        ask,
    })
}

/// Expects Done.
pub(crate) fn done(answer: &Message) -> Result<(), Error> {
    match answer {
        Message::Done => Ok(()),
        other => Err(unexpected(other)),
    }
}

/// How long the host may take to commit so much memory, on a machine that is busy or must find it first.
/// A daemon that ends meanwhile is noticed at once.
pub(crate) fn commit_limit(bytes: u64) -> Duration {
    Duration::from_millis((bytes >> 20).saturating_mul(COMMIT_MS)).min(LONGEST_COMMIT)
}

/// For each MiB: 30 s for a GiB.
const COMMIT_MS: u64 = 30;
const LONGEST_COMMIT: Duration = Duration::from_secs(3600);

/// Longest wait for one answer.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(10);
