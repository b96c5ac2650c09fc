//! What a call names in the program's memory and among its descriptors, copied once.

use super::*;

/// Reads what a thread's calls name.
pub(super) struct Reader<'a> {
    pub(super) thread: u32,
    pub(super) thread_fd: BorrowedFd<'a>,
    pub(super) around: Option<Around<'a>>,
}

/// What a `struct msghdr` names, copied; data is only listed.
pub(super) struct Message {
    pub(super) name: Vec<u8>,
    pub(super) data: Vec<(u64, u64)>,
    pub(super) control: Vec<u8>,
}

impl Reader<'_> {
    pub(super) fn socket(&self, number: i32) -> Result<(OwnedFd, Kind), Number> {
        let socket = process::file_of(self.thread_fd, number).map_err(number_of)?;
        let kind = Kind::of(socket.as_fd()).map_err(number_of)?;
        Ok((socket, kind))
    }

    pub(super) fn bytes(&self, span: Span) -> Result<Vec<u8>, Number> {
        if span.length > socket::ROOM_BYTES as u64 {
            return Err(libc::EINVAL);
        }
        self.copy(span.at, span.length)
    }

    fn copy(&self, at: u64, length: u64) -> Result<Vec<u8>, Number> {
        let mut bytes = vec![0; length as usize];
        memory::read(self.thread, at, &mut bytes).map_err(|_| libc::EFAULT)?;
        Ok(bytes)
    }

    pub(super) fn connect(
        &self,
        socket: i32,
        address: Span,
    ) -> Result<(Task, Option<Proposal>), Number> {
        let (socket, kind) = self.socket(socket)?;
        let name = Name::of(kind, Purpose::Connect, &self.bytes(address)?)?;
        let (to, place, proposal) = self.target(kind, name)?;
        let connect = self.connecting(socket, kind, to, place);
        Ok((Task::Connect(connect), proposal))
    }

    fn connecting(
        &self,
        socket: OwnedFd,
        kind: Kind,
        to: Option<socket::Address>,
        place: Option<Place>,
    ) -> Connect {
        // Nothing has to come back before a socket of datagrams is connected.
        let blocks = kind.kind != libc::SOCK_DGRAM && !is_nonblocking(socket.as_fd());
        let until = blocks
            .then(|| until(socket.as_fd(), libc::SO_SNDTIMEO))
            .flatten();
        let to = to.unwrap_or_else(|| {
            socket::Address::new(&[0; size_of::<libc::sockaddr>()]).expect("it is short")
        });
        Connect {
            socket,
            to,
            place,
            blocks,
            until,
        }
    }

    pub(super) fn bind(
        &self,
        socket: i32,
        address: Span,
        writable: Option<&[PathBuf]>,
    ) -> Result<(Task, Option<Proposal>), Number> {
        let (socket, kind) = self.socket(socket)?;
        Ok(
            match Name::of(kind, Purpose::Bind, &self.bytes(address)?)? {
                Name::Internet { judged, given } => {
                    // Port 0: any. Who listens there is judged then; a datagram socket gets one for each answer.
                    let is_judged = judged.port() != 0
                        && matches!(
                            kind.transport(),
                            Transport::Tcp | Transport::Udp | Transport::Other(_)
                        );
                    if !identity::may_bind(self.thread, judged.port()) {
                        return Err(libc::EACCES);
                    }
                    let proposal = kind.act(Doing::Bind, Target::Internet(judged));
                    let task = Task::Bind {
                        socket,
                        to: given,
                        is_judged,
                    };
                    (task, is_judged.then_some(proposal))
                }
                Name::Path(path) => {
                    let Some(writable) = writable else {
                        return Ok((Task::BindPath { socket, path }, None));
                    };
                    let spot = Spot::of_thread(self.thread, &path)?;
                    let place = spot.path()?;
                    let proposal = (!is_free(&place, writable)).then(|| write(place));
                    (Task::BindSpot { socket, spot }, proposal)
                }
                Name::Abstract(name) => {
                    let mut bytes = vec![0];
                    bytes.extend(name);
                    let to = unix_address(&bytes).ok_or(libc::EINVAL)?;
                    (unjudged(socket, to), None)
                }
                Name::Any => {
                    let to = unix_address(&[]).ok_or(libc::EINVAL)?;
                    (unjudged(socket, to), None)
                }
                Name::Vsock { cid, port, given } => {
                    let proposal = kind.act(Doing::Bind, Target::Vsock { cid, port });
                    (unjudged(socket, given), Some(proposal))
                }
                Name::Other(given) => (unjudged(socket, given), kind.made()),
                Name::Nobody => return Err(libc::EAFNOSUPPORT),
            },
        )
    }

    /// How the kernel is told where to, and what is to be judged before.
    #[expect(
        clippy::type_complexity,
        reason = "three things that belong to one destination"
    )]
    fn target(
        &self,
        kind: Kind,
        name: Name,
    ) -> Result<(Option<socket::Address>, Option<Place>, Option<Proposal>), Number> {
        let connect = |target| Some(kind.act(Doing::Connect, target));
        Ok(match name {
            Name::Nobody => (None, None, None),
            Name::Internet { judged, given } => {
                (Some(given), None, connect(Target::Internet(judged)))
            }
            Name::Path(path) => {
                let place = Place::of(self.thread, &path).map_err(number_of)?;
                let number = place.number().map_err(number_of)?;
                let around = self.around.ok_or(libc::EINVAL)?;
                let proposal = match (around.private)(number) {
                    Some(path) => connect(Target::Path(path)),
                    None if around.own.has(number) => None,
                    None => connect(Target::Path(place.path.clone())),
                };
                (Some(place.address()), Some(place), proposal)
            }
            Name::Abstract(name) => {
                let mut bytes = vec![0];
                bytes.extend(&name);
                let to = unix_address(&bytes).ok_or(libc::EINVAL)?;
                (Some(to), None, connect(Target::Abstract(name)))
            }
            Name::Vsock { cid, port, given } => {
                (Some(given), None, connect(Target::Vsock { cid, port }))
            }
            Name::Other(given) => (Some(given), None, kind.made()),
            Name::Any => return Err(libc::EINVAL),
        })
    }

    pub(super) fn message(&self, at: u64) -> Result<Message, Number> {
        const HEADER_BYTES: u64 = size_of::<libc::msghdr>() as u64;
        let header = self.copy(at, HEADER_BYTES)?;
        let word =
            |at: usize| u64::from_ne_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        use std::mem::offset_of;
        let length = offset_of!(libc::msghdr, msg_namelen);
        let length = header[length..length + 4].try_into().expect("four bytes");
        let length = i32::from_ne_bytes(length);
        // The kernel takes what is too long for an address as long as one, and no negative ones.
        let length = u64::try_from(length).map_err(|_| libc::EINVAL)?;
        let length = length.min(socket::ROOM_BYTES as u64);
        let name = match word(offset_of!(libc::msghdr, msg_name)) {
            0 => Vec::new(),
            at => self.bytes(Span { at, length })?,
        };
        let count = word(offset_of!(libc::msghdr, msg_iovlen));
        if count > libc::UIO_MAXIOV as u64 {
            return Err(libc::EMSGSIZE);
        }
        let parts = self.copy(word(offset_of!(libc::msghdr, msg_iov)), count * 16)?;
        let data = parts.chunks_exact(16).map(|part| {
            let word =
                |at: usize| u64::from_ne_bytes(part[at..at + 8].try_into().expect("eight bytes"));
            (word(0), word(8))
        });
        let data: Vec<(u64, u64)> = data.collect();
        let total = data
            .iter()
            .try_fold(0_u64, |sum, (_, length)| sum.checked_add(*length));
        if total.is_none_or(|total| total > i64::MAX as u64) {
            return Err(libc::EINVAL);
        }
        let control = match word(offset_of!(libc::msghdr, msg_controllen)) {
            0 => Vec::new(),
            length if length > LONGEST_BYTES => return Err(libc::ENOBUFS),
            length => self.copy(word(offset_of!(libc::msghdr, msg_control)), length)?,
        };
        Ok(Message {
            name,
            data,
            control,
        })
    }

    pub(super) fn whole(
        &self,
        socket: OwnedFd,
        kind: Kind,
        message: &Message,
        flags: i32,
    ) -> Result<(Send, Option<Proposal>), Number> {
        let control = Control::of(kind, self.thread, self.thread_fd, &message.control)?;
        self.send(
            socket,
            kind,
            &message.name,
            message.data.clone(),
            control,
            flags,
        )
    }

    pub(super) fn send(
        &self,
        socket: OwnedFd,
        kind: Kind,
        named: &[u8],
        data: Vec<(u64, u64)>,
        control: Control,
        flags: i32,
    ) -> Result<(Send, Option<Proposal>), Number> {
        let fast = flags & libc::MSG_FASTOPEN != 0 && kind.transport() == Transport::Tcp;
        let mut proposal = None;
        let (mut to, mut place, mut connect) = (None, None, None);
        if !named.is_empty() && (fast || kind.transport() != Transport::Tcp) {
            let purpose = if fast {
                Purpose::Connect
            } else {
                Purpose::Send
            };
            let name = Name::of(kind, purpose, named)?;
            if kind.domain == libc::AF_UNIX && kind.kind != libc::SOCK_DGRAM {
                return Err(libc::EISCONN);
            }
            let (address, file, asked) = self.target(kind, name)?;
            proposal = asked;
            if fast {
                let socket = socket.try_clone().map_err(number_of)?;
                connect = Some(self.connecting(socket, kind, address, file));
            } else {
                (to, place) = (address, file);
            }
        } else if fast {
            return Err(libc::EINVAL);
        }
        let mut send = self.plain(socket, kind, data, control, flags & !libc::MSG_FASTOPEN);
        (send.to, send.place, send.connect) = (to, place, connect);
        Ok((send, proposal))
    }

    pub(super) fn plain(
        &self,
        socket: OwnedFd,
        kind: Kind,
        data: Vec<(u64, u64)>,
        control: Control,
        flags: i32,
    ) -> Send {
        let blocks = flags & libc::MSG_DONTWAIT == 0 && !is_nonblocking(socket.as_fd());
        let until = blocks
            .then(|| until(socket.as_fd(), libc::SO_SNDTIMEO))
            .flatten();
        Send {
            socket,
            is_stream: kind.is_stream(),
            to: None,
            place: None,
            connect: None,
            data,
            control,
            flags,
            sent: 0,
            blocks,
            until,
        }
    }
}
