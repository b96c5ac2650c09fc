//! What the daemon asks of a switch: rings that take part, grants, how it is.
//!
//! Nothing here waits for the thread that forwards; who asks how it is looks for the answer later.

use std::num::NonZeroU16;
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use vnplug_ring::direct::Table;

use crate::control::{Change, Line, PATIENCE, Told};
use crate::entrances::Entrances;
use crate::forward::Number;
use crate::link::{Link, Losses};
use crate::roster::{Grant, Granted, Holder, Roster, locked};
use crate::settings::PortSettings;
use crate::show::{NOT_OF_RINGS, Shown};

/// Lets rings take part in a switch, and an operator see and change it.
#[derive(Debug, Clone)]
pub struct Switchboard {
    pub(crate) roster: Arc<Mutex<Roster>>,
    pub(crate) line: Line,
    pub(crate) entrances: Arc<Entrances>,
}

/// A switch that was asked how it is.
#[derive(Debug)]
pub struct Asked {
    board: Switchboard,
    reply: Reply<Told>,
}

/// A switch that was asked to say when all is done that was asked of it before.
#[derive(Debug)]
pub struct Settling(Reply<()>);

/// What the thread that forwards owes.
#[derive(Debug)]
struct Reply<T> {
    from: Receiver<T>,
    until: Instant,
    /// What came of it.
    heard: Option<Result<T, RecvError>>,
}

impl Switchboard {
    /// Takes a port whose frames go through rings: the wanted one, or the first that is free. A
    /// `grant` says what it may and may not, before its first frame comes or goes.
    ///
    /// # Errors
    /// Why there is none.
    pub fn join(
        &self,
        holder: Holder,
        wanted: Option<NonZeroU16>,
        grant: Option<&str>,
    ) -> Result<NonZeroU16, String> {
        let wanted = wanted.map(NonZeroU16::get);
        let port = take(&self.roster, &self.line, holder, (wanted, grant), true)?;
        self.line.send(Change::AddRing(port.get()));
        Ok(port)
    }

    /// Frees it, when nothing goes through its rings any more.
    pub fn leave(&self, port: NonZeroU16) {
        // First: who takes the number again must not be removed.
        self.line.send(Change::Remove(port.get()));
        free(&self.roster, &self.line, port.get());
    }

    /// Whether a port is given frames of the wire only, by its settings.
    pub fn is_cut_for(&self, port: NonZeroU16) -> bool {
        let roster = locked(&self.roster);
        let settings = roster.settings.of(port.get());
        settings.cuts || settings.sums
    }

    /// Whether somebody has this port.
    pub fn is_taken(&self, port: NonZeroU16) -> bool {
        locked(&self.roster).holder(port.get()).is_some()
    }

    /// The ports that are taken, and who has them.
    pub fn holders(&self) -> Vec<(NonZeroU16, Holder)> {
        let roster = locked(&self.roster);
        let ports = roster.holders();
        ports
            .filter_map(|(number, holder)| Some((NonZeroU16::new(number)?, holder.clone())))
            .collect()
    }

    /// Somebody reads one port by itself, or does not any more.
    pub fn read(&self, port: NonZeroU16, comes: bool) {
        self.line.send(Change::Read(port.get(), comes));
    }

    /// A port is a member of a trust group, whose table it reads, or none any more; `place` has the number of
    /// the group, and the port's slot there.
    pub fn direct(&self, port: NonZeroU16, place: Option<(u64, Table, usize)>) {
        self.line.send(Change::Direct(port.get(), place));
    }

    /// Says who may join by which grants. As soon as there is one, nobody else may, but for those who are
    /// trusted.
    pub fn grant(&self, grants: Vec<Grant>) {
        locked(&self.roster).grant(grants);
    }

    /// Asks it how it is.
    pub fn ask(&self) -> Asked {
        Asked {
            board: self.clone(),
            reply: Reply::ask(&self.line, Change::Tell),
        }
    }

    /// Asks it to say when all is done that was asked before.
    pub fn settle(&self) -> Settling {
        Settling(Reply::ask(&self.line, Change::Settle))
    }
}

impl Settling {
    /// True when it has said so, or is not to be waited for any longer; looks at most until `until`.
    pub fn is_over(&mut self, until: Instant) -> bool {
        self.0.is_over(until)
    }

    /// Whether all is done: it has said so, or is gone, and its ports with it.
    pub fn is_done(&self) -> bool {
        self.0.heard.is_some()
    }
}

impl Asked {
    /// True when it has answered, or is not to be waited for any longer; looks at most until `until`.
    pub fn is_over(&mut self, until: Instant) -> bool {
        self.reply.is_over(until)
    }

    /// The answer; `None` if there is none.
    pub fn take(self) -> Option<Shown> {
        let told = self.reply.heard?.ok()?;
        Some(self.board.shown(&told))
    }
}

impl<T> Reply<T> {
    fn ask(line: &Line, what: impl FnOnce(Sender<T>) -> Change) -> Self {
        let (reply, from) = channel();
        line.send(what(reply));
        Self {
            from,
            until: Instant::now() + PATIENCE,
            heard: None,
        }
    }

    fn is_over(&mut self, until: Instant) -> bool {
        if self.heard.is_some() {
            return true;
        }
        let patience = until.saturating_duration_since(Instant::now());
        self.heard = match self.from.recv_timeout(patience) {
            Ok(told) => Some(Ok(told)),
            Err(RecvTimeoutError::Disconnected) => Some(Err(RecvError)),
            Err(RecvTimeoutError::Timeout) => return Instant::now() >= self.until,
        };
        true
    }
}

/// Whether such settings of a port are possible, as a grant has them.
///
/// # Errors
/// What is wrong with them, and what is possible.
pub fn check_grant(settings: &str) -> Result<(), String> {
    PortSettings::default().apply(settings)
}

/// Takes a port for a user that comes by an entrance: the wanted one, or the first that is free.
///
/// # Errors
/// Why there is none, or why the user may not join.
pub(crate) fn admit(
    roster: &Mutex<Roster>,
    line: &Line,
    uid: u32,
    holder: Holder,
    wanted: Option<Number>,
) -> Result<NonZeroU16, String> {
    // One lock: by the grants that there are when the port is taken.
    let mut roster = locked(roster);
    let grant = roster.admit(uid, holder.is_trusted)?;
    take_of(&mut roster, line, holder, (wanted, grant.as_deref()), false)
}

/// Takes a port: the wanted one, or the first that is free, with what a grant says of it.
pub(crate) fn take(
    roster: &Mutex<Roster>,
    line: &Line,
    holder: Holder,
    terms: (Option<Number>, Option<&str>),
    is_ring: bool,
) -> Result<NonZeroU16, String> {
    take_of(&mut locked(roster), line, holder, terms, is_ring)
}

fn take_of(
    roster: &mut Roster,
    line: &Line,
    holder: Holder,
    (wanted, grant): (Option<Number>, Option<&str>),
    is_ring: bool,
) -> Result<NonZeroU16, String> {
    // What is said of a number is not for who has a grant: it says more, or less, than the grant.
    let is_free_of = |number: &Number| grant.is_none() || !roster.settings.says_of(*number);
    let wanted = wanted.filter(is_free_of);
    let port = roster.take(holder, wanted)?;
    let number = port.get();
    // NB: first. If the grant is wrong, who comes next is compared with this one.
    if roster.is_new_to(number) {
        line.send(Change::Anew(number));
    }
    if let Some(text) = grant.filter(|grant| !grant.is_empty()) {
        let mut settings = roster.settings.default.clone();
        let applied = settings.apply(text).and_then(|()| {
            let is_possible = !is_ring || settings.wire.is_plain();
            is_possible.then_some(()).ok_or(NOT_OF_RINGS.to_owned())
        });
        if let Err(error) = applied {
            roster.free(number);
            return Err(format!("what the grant says of it ({text}): {error}"));
        }
        let change = Change::Settings(number, Some(Box::new(settings.clone())));
        let granted = Granted {
            text: text.to_owned(),
            before: roster.settings.ports.insert(number, settings),
        };
        roster.granted.insert(number, granted);
        line.send(change);
    }
    if is_ring {
        roster.add_ring(number);
    }
    Ok(port)
}

/// The link of a port is there. If the port was closed meanwhile, who let it in is told instead.
pub(crate) fn add(
    roster: &Mutex<Roster>,
    line: &Line,
    port: Number,
    link: Box<dyn Link>,
    losses: Losses,
) {
    // With the lock: who closes it does so before, which is seen here, or afterwards.
    let roster = locked(roster);
    match roster.is_closing(port) {
        true => losses.tell(port),
        false => line.send(Change::Add { port, link, losses }),
    }
}

/// Frees a port that is removed; what a grant said of it goes with it.
pub(crate) fn free(roster: &Mutex<Roster>, line: &Line, port: Number) {
    let mut roster = locked(roster);
    if let Some(Granted { before, .. }) = roster.granted.remove(&port) {
        match &before {
            Some(before) => roster.settings.ports.insert(port, before.clone()),
            None => roster.settings.ports.remove(&port),
        };
        line.send(Change::Settings(port, before.map(Box::new)));
    }
    roster.free(port);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};
    use vnplug_os::closer::{Closer, PeerFd};

    use super::*;
    use crate::control::line;
    use crate::link::Loss;
    use crate::settings::Settings;
    use crate::sockets::stream::Stream;

    fn holder(owner: &str) -> Holder {
        Holder {
            owner: owner.into(),
            is_trusted: false,
            way: "ring",
            description: String::new(),
        }
    }

    fn board() -> (Switchboard, crate::control::Inlet) {
        let (line, inlet) = line().unwrap();
        let board = Switchboard {
            roster: Roster::new((3, 2), Settings::default()),
            line,
            entrances: Arc::default(),
        };
        (board, inlet)
    }

    #[test]
    fn what_a_grant_says_holds_while_the_port_is_taken() {
        let (board, inlet) = board();
        let port = NonZeroU16::new(2).unwrap();
        board.set(None, "default.isolated=yes").unwrap();
        assert!(matches!(inlet.take(), Some(Change::Whole(_))));
        let granted = board.join(holder("a"), Some(port), Some("vlan=10"));
        assert_eq!(granted, Ok(port));
        // Before the port is there, and besides what is said of all.
        match inlet.take() {
            Some(Change::Settings(2, Some(it))) => {
                assert_eq!((it.untagged, it.is_isolated), (Some(10), true));
            }
            _ => panic!("no settings"),
        }
        assert!(matches!(inlet.take(), Some(Change::AddRing(2))));
        board.leave(port);
        assert!(matches!(inlet.take(), Some(Change::Remove(2))));
        assert!(matches!(inlet.take(), Some(Change::Settings(2, None))));
        assert!(inlet.take().is_none() && !board.is_taken(port));
    }

    #[test]
    fn who_has_a_grant_cannot_choose_a_number_of_which_something_is_said() {
        let (board, inlet) = board();
        board.set(Some(2), "trunk=10+20").unwrap();
        board.set(None, "static=02:00:00:00:00:09@3").unwrap();
        for number in [2, 3] {
            let wanted = NonZeroU16::new(number);
            let granted = board.join(holder("a"), wanted, Some("vlan=30")).unwrap();
            assert_eq!(granted.get(), 1);
            let mut settings = None;
            while let Some(change) = inlet.take() {
                if let Change::Settings(1, it) = change {
                    settings = it;
                }
            }
            let settings = settings.unwrap();
            assert!(settings.tagged.is_empty() && settings.untagged == Some(30));
            board.leave(granted);
        }
        // Without a grant it may.
        let wanted = NonZeroU16::new(2);
        assert_eq!(board.join(holder("a"), wanted, None).ok(), wanted);
    }

    #[test]
    fn whose_grant_cannot_be_kept_does_not_join_and_takes_no_port() {
        let (board, inlet) = board();
        let wanted = NonZeroU16::new(2);
        let error = board.join(holder("a"), wanted, Some("color=blue"));
        assert!(error.unwrap_err().contains("grant"));
        assert!(!board.is_taken(wanted.unwrap()));
        assert!(inlet.take().is_none());
        assert_eq!(board.join(holder("a"), wanted, None).ok(), wanted);
        let taken = board.join(holder("b"), wanted, None).unwrap_err();
        assert!(taken.contains("port 2 is taken"), "{taken}");
        let first = board.join(holder("b"), None, Some("")).unwrap();
        assert_eq!(first.get(), 1);
        let numbers = board.holders().into_iter().map(|(it, _)| it.get());
        assert_eq!(numbers.collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn who_takes_a_number_that_was_another_owners_has_nothing_of_its_past() {
        let (board, inlet) = board();
        let wanted = NonZeroU16::new(2);
        let mut joins = |owner: &str| {
            let port = board.join(holder(owner), wanted, None).unwrap();
            board.leave(port);
            let mut is_anew = false;
            while let Some(change) = inlet.take() {
                is_anew |= matches!(change, Change::Anew(2));
            }
            is_anew
        };
        let seen = ["a", "a", "b", "b", "a"].map(&mut joins);
        assert_eq!(seen, [false, false, true, false, true]);
    }

    #[test]
    fn a_port_that_is_closed_before_its_link_is_there_gets_none() {
        let (board, inlet) = board();
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (told, losses) = Losses::new(Arc::new(waker));
        let (roster, line) = (&board.roster, &board.line);
        let comes = |closes_first: bool| {
            let port = admit(roster, line, 1000, holder("a"), None).unwrap().get();
            if closes_first {
                board.close(port).unwrap();
                assert!(matches!(inlet.take(), Some(Change::Close(1))));
            }
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let ours = PeerFd::new(ours.into(), Closer::default());
            let link = Box::new(Stream::new(ours, 1514));
            add(roster, line, port, link, told.of(7));
            let is_there = matches!(inlet.take(), Some(Change::Add { port: 1, .. }));
            let loss = losses.try_recv().ok();
            free(roster, line, port);
            assert!(inlet.take().is_none());
            (is_there, loss)
        };
        let loss = Loss { port: 1, client: 7 };
        assert_eq!(comes(false), (true, None));
        assert_eq!(comes(true), (false, Some(loss)));
        // Who takes the number next is not meant.
        assert_eq!(comes(false), (true, None));
    }

    #[test]
    fn where_some_are_granted_to_join_others_are_not_let_in() {
        let (board, _inlet) = board();
        let admit = |uid, trusted| locked(&board.roster).admit(uid, trusted);
        assert_eq!(admit(1000, false), Ok(None));
        board.grant(vec![Grant {
            uid: 1000,
            settings: "vlan=7".into(),
        }]);
        assert_eq!(admit(1000, false), Ok(Some("vlan=7".into())));
        assert!(admit(1001, false).unwrap_err().contains("--allow-join"));
        assert_eq!(admit(1001, true), Ok(None));
    }
}
