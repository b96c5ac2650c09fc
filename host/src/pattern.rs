//! A source for every interface whose name matches a pattern.
//!
//! ```text
//!   netlink ── which interfaces there are ── matches? ──┬── new: opened ──► control thread
//!                                                       └── gone, or of another name: told ──► control thread
//! ```
//!
//! A thread for each pattern hears of interfaces, in the pattern's network namespace, and has the members opened, a few at a time. It
//! never has more of them than the pattern allows, whoever makes interfaces.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::at_once::{self, AT_ONCE, Together};
use crate::spec::{Means, OpenSource, SourceSpec, Star};
use vnplug_os::event;
use vnplug_os::links::Links;
use vnplug_os::namespace::Id;
use vnplug_os::peer_log;
use vnplug_path::source::SourceError;
use vnplug_path::source::af_packet::Namespace;

/// What a specification becomes when it is opened.
pub(crate) enum Opened {
    /// A source.
    One(Box<OpenSource>),
    /// A pattern, whose sources come and go.
    Many(Box<OpenPattern>),
}

impl Opened {
    /// Opens what a specification says.
    ///
    /// # Errors
    /// What is wrong, with the name.
    pub(crate) fn open(spec: &SourceSpec, means: &Means) -> Result<Self, String> {
        let opened = match spec.is_pattern() {
            false => spec.open(means).map(Box::new).map(Self::One),
            true => OpenPattern::open(spec, means).map(Box::new).map(Self::Many),
        };
        opened.map_err(|error| spec.blame(&error, means))
    }

    /// Opens what each specification says, in their order; neighbours that are packet sockets at once, as each waits for the kernel.
    pub(crate) fn each(
        specs: &[SourceSpec],
        open: impl Fn(&SourceSpec) -> Result<Self, String> + Sync,
    ) -> Vec<Result<Self, String>> {
        Self::each_while(specs, open, || true)
    }

    /// The same, all of them or none.
    ///
    /// # Errors
    /// What is wrong with the first, in their order, that cannot be opened. No others are begun when that is known.
    pub(crate) fn all(
        specs: &[SourceSpec],
        open: impl Fn(&SourceSpec) -> Result<Self, String> + Sync,
    ) -> Result<Together<Self>, String> {
        let failed = AtomicBool::new(false);
        let note = |spec: &SourceSpec| {
            let opened = open(spec);
            failed.fetch_or(opened.is_err(), Ordering::Relaxed);
            opened
        };
        let each = Self::each_while(specs, note, || !failed.load(Ordering::Relaxed));
        let (mut all, mut wrong) = (Together::default(), None);
        for opened in each {
            match opened {
                Ok(opened) => all.push_back(opened),
                Err(error) => wrong = wrong.or(Some(error)),
            }
        }
        wrong.map_or(Ok(all), Err)
    }

    fn each_while(
        specs: &[SourceSpec],
        open: impl Fn(&SourceSpec) -> Result<Self, String> + Sync,
        goes_on: impl Fn() -> bool + Sync,
    ) -> Vec<Result<Self, String>> {
        let runs = specs.chunk_by(|one, next| one.is_packet_socket() && next.is_packet_socket());
        let opened = runs.flat_map(|run| {
            let opened = at_once::each(run.iter().take_while(|_| goes_on()), &open);
            let bug = |spec: &SourceSpec| {
                let what = "opening it failed, which is a bug in vnplugd: the log says where";
                Err(format!("source {:?}: {what}", spec.name()))
            };
            let opened = opened.into_iter().zip(run);
            opened.map(move |(opened, spec)| opened.unwrap_or_else(|| bug(spec)))
        });
        opened.collect()
    }

    pub(crate) fn name(&self) -> &str {
        self.spec().name()
    }

    /// As it was written.
    pub(crate) fn spec(&self) -> &SourceSpec {
        match self {
            Self::One(source) => source.spec(),
            Self::Many(pattern) => &pattern.spec,
        }
    }
}

/// A pattern whose interfaces are known and whose thread has not begun.
pub(crate) struct OpenPattern {
    spec: SourceSpec,
    /// What their names are like.
    interfaces: Star,
    most: usize,
    means: Means,
    namespace: Option<Arc<Namespace>>,
    links: Option<(Links, Option<Id>)>,
}

/// What a pattern's thread tells.
pub(crate) struct News {
    /// Which pattern's: names may come again.
    pub(crate) number: u64,
    pub(crate) what: What,
}

/// What became of an interface.
pub(crate) enum What {
    /// It is there, and received.
    Came(Box<OpenSource>),
    /// The source of this name has none any more.
    Went(String),
    /// The sources of all interfaces that were there at first have been told of.
    Settled,
}

/// Ends a pattern's thread when it is dropped.
pub(crate) struct Watching(Arc<OwnedFd>);

impl Drop for Watching {
    fn drop(&mut self) {
        event::ring(&self.0);
    }
}

impl OpenPattern {
    fn open(spec: &SourceSpec, means: &Means) -> Result<Self, SourceError> {
        let (interfaces, most) = spec.members()?;
        spec.check(means)?;
        let namespace = spec.namespace(means)?.map(Arc::new);
        let mut pattern = Self {
            spec: spec.clone(),
            interfaces,
            most,
            means: means.clone(),
            namespace,
            links: None,
        };
        // A namespace that does not exist may come.
        if pattern
            .namespace
            .as_ref()
            .is_none_or(|it| it.id().is_some())
        {
            pattern.links = Some(pattern.watch()?);
        }
        Ok(pattern)
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        self.spec.name()
    }

    /// Whether the kernel may drop frames before its sources.
    pub(crate) fn may_drop_early(&self) -> bool {
        self.spec.may_drop_early()
    }

    /// Starts its thread, which has this number in what it tells and rings the bell then.
    pub(crate) fn start(
        self,
        number: u64,
        tell: Sender<News>,
        bell: Arc<OwnedFd>,
    ) -> io::Result<Watching> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut watcher = Watcher {
            pattern: self,
            number,
            tell,
            bell,
            stop: Arc::clone(&stop),
            members: BTreeMap::new(),
            failed: BTreeMap::new(),
            is_settled: false,
            check_at: Instant::now(),
            told_full: None,
            told: String::new(),
        };
        let thread = thread::Builder::new().name("vnplug-links".into());
        thread.spawn(move || watcher.run())?;
        Ok(Watching(stop))
    }

    /// Opens the source of an interface that matches.
    fn open_member(&self, interface: &str) -> Result<OpenSource, SourceError> {
        let part = self.interfaces.part(interface).unwrap_or_default();
        let spec = self.spec.member(part, interface)?;
        spec.open(&self.means)
    }

    /// Listens where its interfaces are.
    fn watch(&self) -> Result<(Links, Option<Id>), SourceError> {
        let failed = |cause| SourceError::io("cannot hear of interfaces", cause);
        let Some(namespace) = &self.namespace else {
            return Ok((Links::watch().map_err(failed)?, None));
        };
        let (links, id) = namespace.within(Links::watch)?;
        Ok((links.map_err(failed)?, Some(id)))
    }
}

/// A pattern's thread.
struct Watcher {
    pattern: OpenPattern,
    number: u64,
    tell: Sender<News>,
    bell: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
    /// Its sources: the interface's number, its name, and that of the source.
    members: BTreeMap<i32, (String, String)>,
    /// Interfaces that cannot be received, how often they were tried, and when they are again.
    failed: BTreeMap<i32, (u32, Instant)>,
    /// The interfaces that were there at first are its sources.
    is_settled: bool,
    /// When it is looked whether the namespace is the same.
    check_at: Instant,
    /// When it was told that there are more interfaces than it may have sources.
    told_full: Option<Instant>,
    /// Why it hears of no interfaces, as the log has it.
    told: String,
}

impl Watcher {
    fn run(&mut self) {
        while self.sleep() {
            self.find_namespace();
            if self.settle() && !self.is_settled {
                self.is_settled = true;
                self.say(What::Settled);
            }
        }
    }

    /// Until something may have changed; false if it is to end.
    fn sleep(&self) -> bool {
        let now = Instant::now();
        let check = self.pattern.namespace.as_ref().map(|_| self.check_at);
        // As long as there is no room none of them is tried.
        let has_room = self.members.len() < self.pattern.most;
        let again = self.failed.values().map(|(_, at)| *at);
        let at = again.filter(|_| has_room).chain(check).min();
        let pause = at.map(|at| at.saturating_duration_since(now).max(MIN_PAUSE));
        !self.stops_within(pause, true)
    }

    /// Whether it is to end, in this time at most; with `news` it returns when there are some.
    fn stops_within(&self, pause: Option<Duration>, news: bool) -> bool {
        let pause = pause.map(|pause| Timespec {
            tv_sec: pause.as_secs() as i64,
            tv_nsec: i64::from(pause.subsec_nanos()),
        });
        let mut fds = vec![PollFd::new(&*self.stop, PollFlags::IN)];
        if let Some((links, _)) = self.pattern.links.as_ref().filter(|_| news) {
            fds.push(PollFd::new(links, PollFlags::IN));
        }
        // An error (a signal) is an early return.
        let _ = poll(&mut fds, pause.as_ref());
        !fds[0].revents().is_empty()
    }

    /// Looks whether the namespace is the one in which it listens, and if not, for the one that is there now.
    fn find_namespace(&mut self) {
        let now = Instant::now();
        let Some(namespace) = &self.pattern.namespace else {
            return;
        };
        if now < self.check_at {
            return;
        }
        self.check_at = now + CHECK;
        let id = namespace.id();
        let had = self.pattern.links.as_ref().map(|(_, id)| *id);
        if had == Some(id) {
            return;
        }
        if had.is_some() {
            log::warn!(
                target: "source",
                "pattern {:?}: network namespace {:?} is gone",
                self.pattern.name(),
                namespace.name()
            );
            // So that it can end.
            self.pattern.links = None;
            if !namespace.may_return() {
                self.pattern.namespace = None;
                return;
            }
        }
        if id.is_none() {
            return;
        }
        match self.pattern.watch() {
            Ok(links) => {
                self.pattern.links = Some(links);
                self.told.clear();
            }
            Err(error) => {
                let error = error.to_string();
                if error != self.told {
                    log::warn!(target: "source", "pattern {:?}: {error}; it is tried again", self.pattern.name());
                    self.told = error;
                }
            }
        }
    }

    /// Opens and tells until the sources are as the interfaces are; false if these are not known yet, it is to end, or other things
    /// are due.
    fn settle(&mut self) -> bool {
        loop {
            // Each opening takes a while, in which more may change.
            if !self.hear() {
                return false;
            }
            let wanted = self.wanted();
            self.part(&wanted);
            let now = Instant::now();
            let is_due = |index: &i32| self.failed.get(index).is_none_or(|(_, at)| now >= *at);
            let missing: Vec<_> = wanted
                .into_iter()
                .filter(|(index, _)| !self.members.contains_key(index) && is_due(index))
                .collect();
            if missing.is_empty() {
                return true;
            }
            let room = self.pattern.most.saturating_sub(self.members.len());
            if room == 0 {
                self.say_full(missing.len());
                return true;
            }
            let next: Vec<_> = missing.into_iter().take(room.min(AT_ONCE)).collect();
            // Whoever starts the daemon waits for the first ones.
            let pace = match self.is_settled {
                true => PACE * next.len() as u32,
                false => Duration::ZERO,
            };
            self.receive(next);
            let pause = pace.saturating_sub(now.elapsed());
            if self.stops_within(Some(pause), false) || self.must_check() {
                return false;
            }
        }
    }

    /// Whether it is to be looked whether the namespace is the same.
    fn must_check(&self) -> bool {
        self.pattern.namespace.is_some() && Instant::now() >= self.check_at
    }

    /// Takes the kernel's news; whether the interfaces are known as they are.
    fn hear(&mut self) -> bool {
        let Some((links, _)) = &mut self.pattern.links else {
            return true;
        };
        match links.read() {
            Ok(is_known) => is_known,
            Err(error) => {
                log::error!(target: "source", "pattern {:?}: {error}: it hears of no interfaces", self.pattern.name());
                self.pattern.links = None;
                true
            }
        }
    }

    /// The interfaces that match, by number.
    fn wanted(&self) -> BTreeMap<i32, String> {
        let all = self.pattern.links.iter().flat_map(|(links, _)| links.all());
        let matches = all.filter(|(_, it)| {
            it.hardware == libc::ARPHRD_ETHER && self.pattern.interfaces.part(&it.name).is_some()
        });
        matches
            .map(|(index, it)| (*index, it.name.clone()))
            .collect()
    }

    /// Tells of members whose interfaces are gone or have other names.
    fn part(&mut self, wanted: &BTreeMap<i32, String>) {
        self.failed.retain(|index, _| wanted.contains_key(index));
        let is_gone =
            |index: &i32, interface: &str| wanted.get(index).is_none_or(|now| now != interface);
        let mut gone = self
            .members
            .iter()
            .filter(|(index, (it, _))| is_gone(index, it));
        if gone.next().is_none() {
            return;
        }
        // Their last frames come when their blocks' time is over.
        let timeout = self.pattern.spec.block_timeout_ms();
        let drain = 2 * Duration::from_millis(timeout.into()) + DRAIN_MARGIN;
        self.stops_within(Some(drain), false);
        let gone = self
            .members
            .extract_if(.., |index, (it, _)| is_gone(index, it));
        let gone: Vec<_> = gone.map(|(_, (_, source))| source).collect();
        for source in gone {
            self.say(What::Went(source));
        }
    }

    /// Opens the sources of these interfaces.
    fn receive(&mut self, interfaces: Vec<(i32, String)>) {
        let pattern = &self.pattern;
        let opened = at_once::each(interfaces.iter(), |(_, interface)| {
            pattern.open_member(interface)
        });
        for ((index, interface), opened) in interfaces.into_iter().zip(opened) {
            let opened = opened.unwrap_or_else(|| {
                let what = format!("the daemon failed to open {interface:?}, which is a bug");
                Err(SourceError::new(what))
            });
            self.received(index, interface, opened);
        }
    }

    /// Notes what became of an interface that was to be received.
    fn received(&mut self, index: i32, interface: String, opened: Result<OpenSource, SourceError>) {
        match opened {
            Ok(opened) => {
                self.members
                    .insert(index, (interface, opened.name().to_owned()));
                self.say(What::Came(Box::new(opened)));
            }
            Err(error) => {
                let again = Instant::now() + AGAIN;
                let (times, at) = self.failed.entry(index).or_insert((0, again));
                (*times, *at) = (*times + 1, again);
                // At first it may be gone again, which the kernel will tell.
                if *times == 2 {
                    peer_log!(
                        log::Level::Warn,
                        "source",
                        "pattern {:?}: {error}",
                        self.pattern.name()
                    );
                }
            }
        }
    }

    fn say_full(&mut self, left: usize) {
        if self.told_full.is_some_and(|at| at.elapsed() < TOLD) {
            return;
        }
        self.told_full = Some(Instant::now());
        log::warn!(
            target: "source",
            "pattern {:?} has {} sources, which is all that it may have: {left} more interfaces are not received; \
             members=N allows more",
            self.pattern.name(),
            self.members.len()
        );
    }

    fn say(&self, what: What) {
        let number = self.number;
        // The loop is there as long as the process.
        let _ = self.tell.send(News { number, what });
        event::ring(&self.bell);
    }
}

/// How often it is looked whether a namespace is the same.
const CHECK: Duration = Duration::from_millis(500);
/// Until an interface that could not be received is tried again.
const AGAIN: Duration = Duration::from_secs(2);
/// How often it is told that there are more than it may have.
const TOLD: Duration = Duration::from_secs(60);
/// Added to twice the block timeout: older kernels keep it in ticks of up to 10 ms.
const DRAIN_MARGIN: Duration = Duration::from_millis(30);
/// For each opening, after the first ones: a hundred interfaces in a second at most.
///
/// NB: for each the kernel loads one program or two, and frees those of sources that went in its own workers. Where somebody loads
/// them as fast as it goes, and the workers are starved, it does not come to freeing, and may come to a stop.
const PACE: Duration = Duration::from_millis(10);
const MIN_PAUSE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use vnplug_testing::Deadline;

    use super::*;

    #[test]
    fn of_those_that_cannot_be_opened_the_first_is_told_though_a_later_one_failed_sooner() {
        let specs = ["slow", "fast"].map(|it| it.parse::<SourceSpec>().unwrap());
        let (failed, deadline) = (AtomicBool::new(false), Deadline::new("the other fails"));
        let opened = Opened::all(&specs, |spec| {
            match spec.name() {
                "fast" => failed.store(true, Ordering::Relaxed),
                _ => {
                    while !failed.load(Ordering::Relaxed) {
                        deadline.check();
                        thread::sleep(MIN_PAUSE);
                    }
                    // The other may still have to tell of it.
                    thread::sleep(20 * MIN_PAUSE);
                }
            }
            Err(spec.name().to_owned())
        });
        assert_eq!(opened.err().as_deref(), Some("slow"));
    }
}
