//! A source as the operator writes it: `NAME=KIND:WHAT,OPTION=VALUE,…` or a table in the
//! configuration file with the same options.
//!
//! | kind | what | options |
//! |---|---|---|
//! | `af_packet` | interface (default: the name) | `direction=both\|rx\|tx`, `promiscuous=yes\|no`, `queues=N`, `block_size=SIZE`, `blocks=N`, `reserve=yes\|no`, `block_timeout_ms=N`, `snaplen=SIZE`, `hardware_timestamps=yes\|no`, `early=yes\|no`, `wait=yes\|no` |
//! | `af_xdp` | interface (default: the name) | `mode=auto\|zerocopy\|native\|generic`, `queues=all\|0+2`, `take=FILTER`, `fallback=yes\|no`, `promiscuous=yes\|no`, `frames=N`, `frame_size=2048\|4096`, `multi_buffer=yes\|no`, `timestamps=frame\|batch`, `coalesce=MICROSECONDS`, `busy_poll=MICROSECONDS`, `early=yes\|no`, `wait=yes\|no`, `arena=copy\|umem\|vm` |
//! | `pcap` | path of a pcap or pcapng file | `pace=recorded\|top\|2.5x`, `repeat=once\|forever\|N` |
//! | `gen` | – | `size=60\|60-1514\|imix`, `pps=N\|max`, `count=N`, `flows=N`, `protocols=udp4+tcp4+icmp4+udp6+tcp6+icmp6`, `vlan=TCI`, `run=N`, `queues=N` |
//! | `switch` | directory for programs of VDE | `hub=yes\|no`, `ports=N`, `ports_each=N`, `stations=N`, `stations_each=N`, `age=SECONDS`, `hold=SECONDS`, `storm=N/s`, `loops=log\|shut\|no`, `static=MAC@PORT/VLAN`, `default.KEY=VALUE`, `port.N.KEY=VALUE`, `longest=SIZE`, `lanes=N`, `uplink=INTERFACE[/KIND][/OPTION=VALUE…][+…]`, `vhost=PATH`, `vhostconnect=PATH:PATH…`, `stream=PATH`, `bess=PATH`, `dgram=DIR`, `mode=OCTAL`, `dirmode=OCTAL`, `group=NAME`, `mgmt=PATH`, `mgmtmode=OCTAL` |
//!
//! For every kind: `threads=N` (that serve the queues, in turn; the default is one for each queue),
//! `cpus=2+3` (one per thread, in order), `busy=yes` (never sleep), `start=now` or `start=attach` (do not begin before the first port is attached that is not paused; the default
//! for files played a number of times and generators with a count).

mod af_packet;
mod af_xdp;
mod generator;
mod options;
mod pcap;
mod programmed;
mod star;
mod switch;
mod uplink;

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

use self::options::Options;
pub(crate) use self::star::Star;
pub(crate) use self::switch::{is_entrance, is_for_life};
use crate::hub::maker::Errands;
use crate::hub::{Early, Source, SourcePrograms};
use vnplug_os::kept::Kept;
use vnplug_os::namespace::Entrance;
use vnplug_path::engine::{self, ThreadOptions, WorkerOptions};
use vnplug_path::source::af_packet::Interface;
use vnplug_path::source::early::{Seat, SeatOffice};
use vnplug_path::source::lent::PacketDir;
use vnplug_path::source::{Queue, SourceError};
use vnplug_switch::Switchboard;

/// A source to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSpec {
    name: String,
    kind: String,
    options: BTreeMap<String, String>,
    /// Whether an interface that does not exist is waited for, if no option says it.
    waits: bool,
    /// The pattern that its interface matches.
    pattern: Option<String>,
    /// It is not opened, but only looked at.
    checks: bool,
}

/// What sources are opened with.
#[derive(Debug, Clone, Default)]
pub struct Means {
    /// Where packet memory lies that VMs can map.
    pub files: Option<PacketDir>,
    /// The user (uid, gid) that the daemon will be.
    pub user: Option<(u32, u32)>,
    /// The operator's programs.
    pub programs: SourcePrograms,
    /// By which other network namespaces are entered.
    pub entrance: Arc<Entrance>,
    /// What the service manager keeps over a restart.
    pub kept: Arc<Kept>,
    /// Who makes what early drop needs.
    pub seats: SeatOffice,
    /// Who opens what takes rights that were given up; nobody: the calling thread does.
    pub errands: Errands,
    /// The daemon runs, and has given up what it needs no more.
    pub is_late: bool,
    /// How many packet sockets there are, with those that are opened now, that do not say how long a frame may wait for its block to fill.
    pub untimed: usize,
}

/// A source whose queues are open and whose threads have not begun.
pub struct OpenSource {
    spec: SourceSpec,
    kind: &'static str,
    description: String,
    interface: Option<Interface>,
    /// By which rings take part in a switch.
    board: Option<Switchboard>,
    /// It must be able to lock memory once more, when an interface comes back.
    locks_memory: bool,
    queues: Vec<Box<dyn Queue>>,
    cpus: Vec<usize>,
    /// How many threads serve the queues; `None`: one each.
    threads: Option<usize>,
    hold: bool,
    busy: bool,
    /// The operator's program that the kernel runs as a part of its own.
    in_kernel: Option<String>,
    /// The operator's program that its queues run in the daemon; empty = none.
    program: String,
}

const MAX_NAME: usize = 63;

impl SourceSpec {
    /// A source of this name and kind with these options; `what` is the option that the text form
    /// has after the colon.
    ///
    /// # Errors
    /// [`SourceError`] if the name is not one.
    pub fn new(
        name: &str,
        kind: &str,
        options: BTreeMap<String, String>,
    ) -> Result<Self, SourceError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.*".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(allowed) {
            return Err(SourceError::new(format!(
                "{name:?} is no name for a source: use 1 to {MAX_NAME} letters, digits, - _ ."
            )));
        }
        let wrong = match name.matches('*').count() {
            0 => None,
            // NB: the grant * is for every source.
            _ if name == "*" => Some("has more than the star"),
            1 if kind == "af_packet" => None,
            1 => Some("can be only of the kind af_packet"),
            _ => Some("has one star"),
        };
        if let Some(wrong) = wrong {
            return Err(SourceError::new(format!(
                "{name:?}: a pattern of interfaces {wrong}"
            )));
        }
        Ok(Self {
            name: name.to_owned(),
            kind: kind.to_owned(),
            options,
            waits: false,
            pattern: None,
            checks: false,
        })
    }

    /// The same, waiting for an interface that does not exist unless an option says otherwise: what a file says is for hosts
    /// whose interfaces come and go; who types a name wants to hear that it is wrong.
    #[must_use]
    pub fn waiting(self) -> Self {
        let has_interface = matches!(self.kind.as_str(), "af_packet" | "af_xdp");
        Self {
            waits: has_interface,
            ..self
        }
    }

    /// The name that readers use.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// An error of this source, with its name.
    pub(crate) fn blame(&self, error: &SourceError, means: &Means) -> String {
        let is_denied = error
            .cause
            .as_ref()
            .is_some_and(|it| it.kind() == std::io::ErrorKind::PermissionDenied);
        let mut error = error.to_string();
        if is_denied && means.is_late && self.is_switch() {
            let us = rustix::process::geteuid().as_raw();
            error += &format!(
                " (the daemon runs as user {us}: name a place where that may make files, or put it into the configuration and start \
                 the daemon again)"
            );
        }
        match error.contains(&format!("{:?}", self.name)) {
            true => error,
            false => format!("source {:?}: {error}", self.name),
        }
    }

    /// Whether another source can take its place while the daemon runs. A switch has paths that two cannot have at once; AF_XDP
    /// takes rights that were given up.
    pub(crate) fn may_change(&self) -> bool {
        !matches!(self.kind.as_str(), SWITCH | "af_xdp")
    }

    /// Whether it is one source, received by packet sockets.
    pub(crate) fn is_packet_socket(&self) -> bool {
        self.kind == "af_packet" && !self.is_pattern()
    }

    /// Whether it is one packet socket that does not say how long a frame may wait for its block to fill.
    pub(crate) fn is_untimed(&self) -> bool {
        self.is_packet_socket() && !self.options.contains_key(af_packet::TIMEOUT)
    }

    /// Whether it is in a network namespace that must be entered.
    pub(crate) fn enters(&self) -> bool {
        self.options.contains_key("netns")
    }

    /// Opens the source; needs the privileges that its kind needs.
    ///
    /// # Errors
    /// [`SourceError`] if an option is unknown or out of range, or what the kind says.
    pub fn open(&self, means: &Means) -> Result<OpenSource, SourceError> {
        let mut options = Options {
            name: &self.name,
            left: self.options.clone(),
            waits: self.waits,
            checks: self.checks,
        };
        let cpus = options.list("cpus", |text| text.parse().ok())?;
        let threads = options.number("threads")?;
        if threads == Some(0) {
            return Err(options.bad("threads", "0", "a number of threads above 0"));
        }
        let busy = options.flag("busy")?.unwrap_or(false);
        let asked = match options.take("start").as_deref() {
            None => None,
            Some("now") => Some(false),
            // It would not even answer, let alone forward, before somebody captures.
            Some("attach") if self.kind == SWITCH => {
                let what = format!(
                    "switch {:?} forwards from the start: leave start=attach away",
                    self.name
                );
                return Err(SourceError::new(what));
            }
            Some("attach") => Some(true),
            Some(other) => return Err(options.bad("start", other, "now or attach")),
        };
        let program = match options.take("program") {
            None => None,
            Some(_) if self.kind == SWITCH => {
                let what = format!(
                    "switch {:?} has no program: ports that read it may",
                    self.name
                );
                return Err(SourceError::new(what));
            }
            Some(name) => Some(means.programs.named(&name).map_err(SourceError::new)?),
        };
        let ran = program.as_ref().map(|it| it.program.name.clone());
        let mut interface: Option<Interface> = None;
        let mut board = None;
        let mut locks_memory = false;
        let (kind, description, queues, ends) = match self.kind.as_str() {
            "af_packet" => af_packet::open(&mut options, &mut interface, means)?,
            "af_xdp" => af_xdp::open(&mut options, &mut interface, means, program.as_ref())?,
            "pcap" => pcap::open(&mut options)?,
            "gen" => generator::open(&mut options)?,
            SWITCH => switch::open(&mut options, &mut board, &mut locks_memory, means)?,
            kind => {
                return Err(SourceError::new(format!(
                    "source {:?}: no kind {kind:?}; there are af_packet, af_xdp, pcap, gen and switch",
                    self.name
                )));
            }
        };
        let queues = match &program {
            // Where XDP runs it, or what is there instead, see to it.
            Some(program) if self.kind != "af_xdp" => {
                let here = interface.as_ref().filter(|it| it.is_here());
                programmed::all(queues, program, here.map(Interface::name))?
            }
            _ => queues,
        };
        let description = match &self.pattern {
            None => description,
            Some(pattern) => format!("{description}, of {pattern}"),
        };
        // Here it may be waited for.
        if let Some(interface) = &interface {
            interface.look();
        }
        Ok(OpenSource {
            spec: self.clone(),
            kind,
            description,
            interface,
            board,
            locks_memory: locks_memory || kind == "af_xdp",
            in_kernel: ran.clone().filter(|_| kind == "af_xdp"),
            program: ran.filter(|_| kind != "af_xdp").unwrap_or_default(),
            queues,
            cpus,
            threads,
            hold: asked.unwrap_or(ends),
            busy,
        })
    }
}

impl FromStr for SourceSpec {
    type Err = SourceError;

    /// `NAME=KIND:WHAT,OPTION=VALUE,…`; a bare `NAME` is an interface.
    fn from_str(text: &str) -> Result<Self, SourceError> {
        let (name, rest) = text.split_once('=').unwrap_or((text, "af_packet"));
        let mut parts = rest.split(',');
        let first = parts.next().unwrap_or_default();
        let (kind, what) = first.split_once(':').unwrap_or((first, ""));
        let mut options = BTreeMap::new();
        if !what.is_empty() {
            let key = match kind {
                "pcap" => "path",
                SWITCH => "vde",
                "gen" => {
                    return Err(SourceError::new(format!(
                        "source {name:?}: gen takes nothing after a colon ({what:?}), only options"
                    )));
                }
                _ => "interface",
            };
            options.insert(key.to_owned(), what.to_owned());
        }
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(SourceError::new(format!(
                    "source {name:?}: {part:?} is not OPTION=VALUE"
                )));
            };
            if options.insert(key.to_owned(), value.to_owned()).is_some() {
                return Err(SourceError::new(format!(
                    "source {name:?}: {key} is given twice"
                )));
            }
        }
        Self::new(name, kind, options)
    }
}

impl OpenSource {
    /// The name that readers use.
    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }

    /// As it was written.
    pub(crate) fn spec(&self) -> &SourceSpec {
        &self.spec
    }

    /// What speaks to it, if it is a switch.
    pub(crate) fn board(&self) -> Option<&Switchboard> {
        self.board.as_ref()
    }

    /// The operator's program that the kernel runs before it, if it does, and where.
    pub(crate) fn program_in_kernel(&self) -> Option<(&str, String)> {
        let program = self.in_kernel.as_deref()?;
        let at = self.interface.as_ref().map_or("", |it| it.name());
        Some((program, format!("xdp:{at} source {}", self.name())))
    }

    /// Whether it must be able to lock memory once more, when its interface comes back.
    pub(crate) fn locks_memory(&self) -> bool {
        self.locks_memory
    }

    /// Whether the kernel can drop frames before its queues.
    pub(crate) fn may_drop_early(&mut self) -> bool {
        self.seats().is_ok()
    }

    /// Whether early drop takes the right to load XDP programs.
    pub(crate) fn narrows_xdp(&mut self) -> bool {
        self.seats()
            .is_ok_and(|seats| seats.iter().any(Seat::is_shared))
    }

    /// Where the kernel can drop frames before each queue; or why not, if it is a matter of the
    /// kernel's at all.
    fn seats(&mut self) -> Result<Vec<Seat>, Option<String>> {
        let seat = |queue: &mut Box<dyn Queue>| match queue.early() {
            Some(early) => early.seat().map_err(Some),
            None => Err(None),
        };
        self.queues.iter_mut().map(seat).collect()
    }

    /// Starts its threads. `number` is the source's number in the daemon.
    ///
    /// # Errors
    /// [`SourceError`] when threads or descriptors are short.
    pub fn start(mut self, number: u16) -> Result<Source, SourceError> {
        let seats = self.seats();
        let transmits = |queue: &mut Box<dyn Queue>| queue.transmitter().is_some();
        let transmits = self.queues.iter_mut().all(transmits);
        let lent = self.queues.iter().map(|queue| queue.lent()).collect();
        let threads = self.threads.unwrap_or(usize::MAX).min(self.queues.len());
        let mut shares: Vec<Vec<_>> = (0..threads).map(|_| Vec::new()).collect();
        for (queue, at) in self.queues.into_iter().zip(0_u16..) {
            let options = WorkerOptions {
                name: format!("{}@{at}", self.spec.name),
                source: number,
                queue: at,
                hold: self.hold,
                busy: self.busy,
            };
            shares[usize::from(at) % threads].push((queue, options));
        }
        let mut of_thread = Vec::new();
        for (at, share) in shares.into_iter().enumerate() {
            let thread = ThreadOptions {
                name: format!("{}@{at}", self.spec.name),
                cpu: self.cpus.get(at).copied(),
            };
            let started = engine::start(share, thread);
            let started = started
                .map_err(|error| SourceError::io(format!("source {:?}", self.spec.name), error))?;
            of_thread.push(started.into_iter());
        }
        // In the order of their queues again.
        let mut workers = Vec::new();
        while let Some(worker) = of_thread[workers.len() % threads].next() {
            workers.push(worker);
        }
        let is_untimed = self.spec.is_untimed();
        Ok(Source {
            name: self.spec.name,
            kind: self.kind,
            description: self.description,
            link_type: LINKTYPE_ETHERNET,
            interface: self.interface.map(Arc::new),
            board: self.board,
            transmits,
            early: Early::new(seats, &workers),
            lent,
            workers,
            program: self.program,
            is_untimed,
            closing: 0,
        })
    }
}

/// What is said of a configuration if frames wait longer than usual, as many sources do not say how long.
pub(crate) fn told_timeout<'a>(specs: impl Iterator<Item = &'a SourceSpec>) -> Option<String> {
    af_packet::told_timeout(untimed(specs))
}

/// How many do not say how long a frame may wait for its block to fill.
pub(crate) fn untimed<'a>(specs: impl Iterator<Item = &'a SourceSpec>) -> usize {
    specs.filter(|spec| spec.is_untimed()).count()
}

/// The link type of every source.
pub(crate) const LINKTYPE_ETHERNET: u32 = 1;

/// The kind of a source that is a switch.
pub(crate) const SWITCH: &str = "switch";

type Opened = (&'static str, String, Vec<Box<dyn Queue>>, bool);

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        match text
            .parse::<SourceSpec>()
            .and_then(|spec| spec.open(&Means::default()))
        {
            Ok(_) => panic!("{text} was accepted"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_generator_opens_with_its_options() {
        let spec: SourceSpec = "lab=gen,size=imix,pps=1000,count=5,queues=2"
            .parse()
            .unwrap();
        let source = spec.open(&Means::default()).unwrap();
        assert_eq!(
            (source.kind, source.queues.len(), source.hold),
            ("gen", 2, true)
        );
        assert!(
            source.description.contains("1000 packets/s"),
            "{}",
            source.description
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("a b=gen", "no name for a source"),
            ("lab=gen,size", "not OPTION=VALUE"),
            ("lab=gen,colour=red", "no option \"colour\""),
            ("lab=gen,start=soon", "now or attach"),
            ("file=pcap:/nowhere,colour=red", "no option \"colour\""),
            ("no-such-if0=af_packet,colour=red", "no option \"colour\""),
            ("no-such-if0=af_xdp,colour=red", "no option \"colour\""),
            ("lab=gen,pps=fast", "a number or max"),
            ("lab=gen,protocols=udp+ipx", "\"ipx\""),
            ("lab=gen:foo", "takes nothing after a colon"),
            ("lab=gen,count=0", "above 0"),
            ("lab=gen,pps=1,pps=2", "pps is given twice"),
            ("a=pcap:x,path=y", "path is given twice"),
            ("lan=switch,mode=0700", "vde=DIR"),
            ("lan=switch,stream=/nowhere/x,mgmt=/x", "vde=DIR"),
            ("lan=switch,stream=/nowhere/x", "/nowhere/x"),
            ("lan=switch,bess=/nowhere/x", "/nowhere/x"),
            ("lan=switch,dgram=/nowhere/x", "/nowhere/x"),
            ("lan=switch:/nowhere/x,mode=0o999", "in octal"),
            ("lan=switch:/nowhere/x", "/nowhere/x"),
            ("lan=switch,ports=70000", "up to 16384"),
            ("lan=switch,stations=9000000", "up to 1048576"),
            ("lan=switch,longest=100", "from 1514"),
            ("lan=switch,lanes=65", "up to 64"),
            ("lan=switch:/nowhere/x,group=no-such-group", "no-such-group"),
            ("lan=switch,colour=red", "no option \"colour\""),
            ("lan=switch,uplink=", "the name of an interface"),
            ("lan=switch,uplink=lo/fast", "/af_packet or /af_xdp"),
            (
                "lan=switch,uplink=lo/direction=tx",
                "no option \"direction\"",
            ),
            ("lan=switch,uplink=lo/colour=red", "no option \"colour\""),
            ("lan=switch,uplink=no-such-if0/af_xdp", "uplink no-such-if0"),
            ("lan=switch,age=old", "a number of seconds"),
            ("lan=switch,port.3.colour=red", "there are vlan=ID"),
            ("lan=switch,port.20000.vlan=3", "to 16384"),
            ("lan=switch,default.storm=many", "frames a second"),
            ("lan=switch,static=here", "MAC@PORT"),
            ("lab=tape", "no kind \"tape\""),
            ("file=pcap", "needs a path"),
            ("file=pcap:/nowhere/x.pcap", "/nowhere/x.pcap"),
            ("no-such-if0", "no-such-if0"),
            ("no-such-if0=af_packet,block_size=big", "a size like"),
            ("no-such-if0=af_packet,snaplen=8G", "a size like"),
            ("no-such-if0=af_packet,block_size=256K", "no-such-if0"),
            ("eth0=af_packet,netns=a/b", "no network namespace"),
            (
                "eth0=af_packet,netns=vnplug-none",
                "/run/netns/vnplug-none; list them with: ip netns (or wait",
            ),
            ("eth0=af_xdp,netns=c1", "no option \"netns\""),
        ] {
            assert!(error(text).contains(part), "{text}: {}", error(text));
        }
    }
}
