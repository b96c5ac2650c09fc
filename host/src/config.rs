//! What the operator sets: a TOML file and command-line flags over it.
//!
//! ```toml
//! socket = "/run/vnplug/vnplug.sock"   # where clients connect
//! socket_mode = 0o660                  # who may (with socket_group)
//! user = "vnplug"                      # switch to this user after start
//! ring_bytes = "4MiB"                  # a ring when the reader does not say
//!
//! observers = ["vnplug-metrics"]       # who else sees all counters, and nothing more
//!
//! [[source]]
//! name = "eth1"
//! kind = "af_packet"
//! queues = 2
//!
//! [[allow]]                            # who may see what; root sees everything
//! vm = "probe"                         # or: uid = 1000
//! source = "eth1"
//! filter = "not port 22"               # obligatory, before the reader's own
//! send = true                          # and may send any frame through it; default: false
//! send_terms = "ip=10.0.0.5"           # but no other than these
//!
//! [[join]]                             # who may join a switch, and settings of its port
//! vm = "probe"                         # or: uid = 1000
//! switch = "lan0"
//! vlan = 10
//! mac = "02:00:00:00:00:01"
//!
//! [[backend]]                          # a process of somebody else's that guests may use
//! id = 85
//! name = "kv"
//! uid = 1000                           # whose process may be it
//! open = ["vm:*", "uid:1001"]          # who may connect
//! memory = "16MiB"                     # that it may share with them
//!
//! [[program]]                          # eBPF that ports may have their frames go through
//! name = "count"
//! file = "/etc/vnplug/count.o"         # or FILE.o:FUNCTION
//! open = ["vm:*", "uid:1001"]          # who may use it, and see its maps
//! attach = ["xdp:eth1"]                # where the kernel runs it as well, on the same maps
//! ```

mod file;
mod grants;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Parser;
use serde::Deserialize;
use vnplug_ring::control::{DEFAULT_SOCKET, Grant, GrantKind};

use self::file::{File, backend, bytes, flat, joiner, observer, program, read, source};
use crate::hub::grant::Given;
use crate::hub::{BackendGrant, Join, Peer, Sending, TwinGrant};
use crate::spec::{SWITCH, SourceSpec};
use vnplug_filter::DEFAULT_LIMIT_BYTES;

/// Receives every packet of a wire once, filters it early and hands it to applications in virtual
/// machines, containers and processes over shared-memory rings.
#[derive(Debug, Clone, Parser)]
#[command(name = "vnplugd", version, after_help = EXAMPLES)]
pub struct Arguments {
    /// Configuration file (TOML); flags add to it and override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Unix socket for clients
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Directory for the sockets and records of VMs
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Directory for VMs' memory pools: a tmpfs or hugetlbfs
    #[arg(long, value_name = "DIR")]
    pub pool_dir: Option<PathBuf>,
    /// A source: NAME=KIND:WHAT,OPTION=VALUE,… or just the name of an interface
    #[arg(long, value_name = "SPEC")]
    pub source: Vec<String>,
    /// A switch: NAME,OPTION=VALUE,… as lan0,vde=/run/lan0.ctl
    #[arg(long, value_name = "SPEC")]
    pub switch: Vec<String>,
    /// Grants
    #[arg(
        long,
        value_name = "GRANT",
        help = "Grant: vm:NAME=SOURCE[:FILTER] or uid:N=SOURCE[:FILTER]; SOURCE may be *"
    )]
    pub allow: Vec<String>,
    /// Permissions to send
    #[arg(
        long,
        value_name = "GRANT",
        help = "Permission to send frames onto a wire: vm:NAME=SOURCE or uid:N=SOURCE, and terms: \
                ,mac=02:00:00:00:00:01,vlan=10,ip=10.0.0.0/8,filter=EXPRESSION"
    )]
    pub allow_send: Vec<String>,
    /// Permissions to join a switch
    #[arg(
        long,
        value_name = "GRANT",
        help = "Permission to join a switch: vm:NAME=SWITCH or uid:N=SWITCH, and settings of the port: \
                ,vlan=10,mac=02:00:00:00:00:01"
    )]
    pub allow_join: Vec<String>,
    /// Permissions to be a back-end
    #[arg(
        long,
        value_name = "GRANT",
        help = "Permission to be a back-end, and who may use it: kv,id=85,uid=1000,open=vm:*+uid:1001,memory=16M"
    )]
    pub backend: Vec<String>,
    /// Users that see all counters, and may do nothing more for it
    #[arg(long, value_name = "USER")]
    pub observer: Vec<String>,
    /// Programs that ports may have their frames go through
    #[arg(
        long,
        value_name = "PROGRAM",
        help = "An eBPF program that frames of ports may go through, and who may use it: \
                count=FILE.o[:FUNCTION],open=vm:*+uid:1001,attach=xdp:eth1"
    )]
    pub program: Vec<String>,
    /// Whether operators may change programs while the daemon runs: on or off
    #[arg(long, value_name = "on|off")]
    pub change_programs: Option<OnOff>,
    /// Switch to this user after start
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// While there are ports, no CPU of the host idles so deeply that it takes longer to wake; 0:
    /// none halts. Costs power
    #[arg(long, value_name = "MICROSECONDS")]
    pub wake_us: Option<u32>,
    /// Whether filters become machine code, in the background: on or off
    #[arg(long, value_name = "on|off")]
    pub jit: Option<OnOff>,
    /// Only say whether the configuration is right, and open nothing
    #[arg(long)]
    pub check: bool,
    /// Have the daemon that runs with this configuration read it again; fails if it refuses, with what it says
    #[arg(long, conflicts_with = "check")]
    pub reload: bool,
    /// Say more (-v: debug)
    #[arg(short, long)]
    pub verbose: bool,
}

const EXAMPLES: &str = "Examples:
  vnplugd --source eth1
  vnplugd --source 'eth1=af_packet:eth1,queues=2,cpus=2+3' --allow 'vm:probe=eth1:not port 22'
  vnplugd --source lab=gen,size=60,pps=1000000 --source old=pcap:trace.pcapng,pace=top
  vnplugd --switch lan0,vde=/run/lan0.ctl

Options of each kind of source: see docs/sources.md. Clients: see vnplug --help.
Exit status: 0 ended by SIGTERM or SIGINT, 1 could not start or go on, 2 wrong usage.";

/// A choice of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum OnOff {
    /// It is done.
    On,
    /// It is not done.
    Off,
}

/// The whole configuration.
#[derive(Debug)]
pub struct Config {
    /// Unix socket for clients.
    pub socket: PathBuf,
    /// Its permission bits.
    pub socket_mode: u32,
    /// Its group.
    pub socket_group: Option<String>,
    /// Directory for the sockets and records of VMs.
    pub state_dir: PathBuf,
    /// Directory for pools.
    pub pool_dir: PathBuf,
    /// User to switch to.
    pub user: Option<String>,
    /// Users that see all counters.
    pub observers: Vec<u32>,
    /// Bytes of a ring's record area when a reader does not say.
    pub ring_bytes: u64,
    /// The most a reader may ask for.
    pub max_ring_bytes: u64,
    /// Bytes of a VM's pool when the operator does not say.
    pub pool_bytes: u64,
    /// Ports in all.
    pub max_ports: usize,
    /// Ports of one user that is no operator, or of one VM.
    pub max_ports_each: usize,
    /// Bytes of rings of one user that is no operator; a VM has its pool.
    pub max_user_bytes: u64,
    /// Microseconds within which CPUs wake while there are ports, if the operator asks for it.
    pub wake_us: Option<u32>,
    /// Filters become machine code.
    pub jit: OnOff,
    /// Bytes that all their machine code may take.
    pub jit_bytes: u64,
    /// Sources in order; their numbers are their places here.
    pub sources: Vec<SourceSpec>,
    /// Grants to users.
    pub users: Vec<(u32, Grant)>,
    /// Grants to VMs.
    pub vms: Vec<(String, Grant)>,
    /// Who may send through which source.
    pub senders: Vec<Sending>,
    /// Who may join which switch.
    pub joiners: Vec<Join>,
    /// Who may be a back-end, and who may use it.
    pub backends: Vec<BackendGrant>,
    /// The operator's programs.
    pub programs: Vec<TwinGrant>,
    /// They may change while the daemon runs.
    pub change_programs: OnOff,
}

impl Config {
    /// Reads the file, if any, and lays the flags over it.
    ///
    /// # Errors
    /// A text that names the file or flag and what is wrong.
    pub fn load(arguments: Arguments) -> Result<Self, String> {
        let file = match &arguments.config {
            None => File::default(),
            Some(path) => read(path)?,
        };
        let size = |key: &str, value: Option<toml::Value>, default: u64| match value {
            None => Ok(default),
            Some(value) => bytes(&value).ok_or_else(|| {
                format!("{key} is a number of bytes or a text like \"64MiB\", not {value}")
            }),
        };
        let socket = arguments
            .socket
            .or(file.socket)
            .unwrap_or_else(|| DEFAULT_SOCKET.into());
        let state_dir = arguments.state_dir.or(file.state_dir).unwrap_or_else(|| {
            socket
                .parent()
                .map_or_else(|| PathBuf::from("."), Path::to_owned)
        });
        let mut sources = Vec::new();
        for table in file.source {
            sources.push(source(table)?);
        }
        for text in &arguments.source {
            sources.push(
                text.parse::<SourceSpec>()
                    .map_err(|error| error.to_string())?,
            );
        }
        for mut table in file.switch {
            if table.insert("kind".into(), SWITCH.into()).is_some() {
                return Err("a [[switch]] has no kind".into());
            }
            for key in ["mode", "dirmode", "mgmtmode"] {
                // As the command line has it. NB: 660 becomes 01224, which is refused, and 0o660 0660.
                if let Some(toml::Value::Integer(bits)) = table.get(key) {
                    table.insert(key.into(), format!("{bits:o}").into());
                }
            }
            sources.push(source(flat(table))?);
        }
        for text in &arguments.switch {
            let (name, options) = text.split_once(',').unwrap_or((text, ""));
            if name.contains('=') {
                return Err(format!("--switch {text}: write NAME,OPTION=VALUE,…"));
            }
            let comma = if options.is_empty() { "" } else { "," };
            let spec = format!("{name}={SWITCH}{comma}{options}").parse::<SourceSpec>();
            sources.push(spec.map_err(|error| error.to_string())?);
        }
        for (at, spec) in sources.iter().enumerate() {
            if sources[..at]
                .iter()
                .any(|earlier| earlier.name() == spec.name())
            {
                return Err(format!("two sources are named {:?}", spec.name()));
            }
        }
        let mut users = Vec::new();
        let mut vms = Vec::new();
        let mut senders = Vec::new();
        for table in file.allow {
            if !table.send_terms.is_empty() && !table.send {
                return Err("send_terms is for an [[allow]] with send = true".into());
            }
            if table.send {
                let whom = match (&table.vm, table.uid) {
                    (Some(vm), _) => Peer::Vm(vm.clone()),
                    (None, uid) => Peer::User(uid.unwrap_or_default()),
                };
                senders.push(Sending {
                    whom,
                    source: table.source.clone(),
                    terms: table.send_terms.clone(),
                });
            }
            let grant = Grant {
                source: table.source,
                filter: table.filter,
            };
            match (table.vm, table.uid) {
                (Some(vm), None) => vms.push((vm, grant)),
                (None, Some(uid)) => users.push((uid, grant)),
                _ => return Err("an [[allow]] names either a vm or a uid".into()),
            }
        }
        for text in &arguments.allow {
            match Given::read(GrantKind::See, text)?.sight() {
                (Peer::Vm(name), grant) => vms.push((name, grant)),
                (Peer::User(uid), grant) => users.push((uid, grant)),
            }
        }
        for text in &arguments.allow_send {
            senders.push(Given::read(GrantKind::Send, text)?.sending());
        }
        let mut joiners = Vec::new();
        for table in file.join {
            joiners.push(joiner(table)?);
        }
        for text in &arguments.allow_join {
            joiners.push(Given::read(GrantKind::Join, text)?.join());
        }
        let tables = file.backend.into_iter().map(backend);
        let flags = arguments.backend.iter().map(|text| backend_grant(text));
        let backends: Vec<BackendGrant> = tables.chain(flags).collect::<Result<_, _>>()?;
        for (at, grant) in backends.iter().enumerate() {
            let same = |it: &&BackendGrant| it.id == grant.id || it.name == grant.name;
            if let Some(other) = backends[..at].iter().find(same) {
                return Err(format!(
                    "back-ends {:?} and {:?} have the same id or name",
                    other.name, grant.name
                ));
            }
        }
        let tables = file.program.into_iter().map(program);
        let flags = arguments.program.iter().map(|text| program_of(text));
        let programs: Vec<TwinGrant> = tables.chain(flags).collect::<Result<_, _>>()?;
        for (at, grant) in programs.iter().enumerate() {
            if programs[..at].iter().any(|it| it.name == grant.name) {
                return Err(format!("two programs are named {:?}", grant.name));
            }
        }
        let flags = arguments.observer.into_iter().map(toml::Value::String);
        let observers = file.observers.into_iter().chain(flags);
        let observers = observers.map(|user| observer(&user));
        let observers = observers.collect::<Result<_, _>>()?;
        let max_ring_bytes = size("max_ring_bytes", file.max_ring_bytes, 1 << 30)?;
        let config = Self {
            socket,
            socket_mode: file.socket_mode.unwrap_or(0o600),
            socket_group: file.socket_group,
            state_dir,
            pool_dir: arguments
                .pool_dir
                .or(file.pool_dir)
                .unwrap_or_else(|| "/dev/shm".into()),
            user: arguments.user.or(file.user),
            observers,
            ring_bytes: size("ring_bytes", file.ring_bytes, max_ring_bytes.min(4 << 20))?,
            max_ring_bytes,
            pool_bytes: size("pool_bytes", file.pool_bytes, 64 << 20)?,
            max_ports: file.max_ports.unwrap_or(16_384),
            max_ports_each: file.max_ports_each.unwrap_or(1_024),
            max_user_bytes: size("max_user_bytes", file.max_user_bytes, 128 << 20)?,
            wake_us: arguments.wake_us.or(file.wake_us),
            jit: arguments.jit.or(file.jit).unwrap_or(OnOff::On),
            jit_bytes: size("jit_bytes", file.jit_bytes, DEFAULT_LIMIT_BYTES)?,
            sources,
            users,
            vms,
            senders,
            joiners,
            backends,
            programs,
            change_programs: arguments
                .change_programs
                .or(file.change_programs)
                .unwrap_or(OnOff::Off),
        };
        config.check()?;
        Ok(config)
    }

    /// Values that are fine by themselves and cannot be meant.
    fn check(&self) -> Result<(), String> {
        let mode = self.socket_mode;
        if mode > 0o777 {
            // 660 for 0o660 is what happens; every mode that means something is larger than 0o777 so.
            return Err(format!(
                "socket_mode is {mode}, which is no mode; write it in octal: socket_mode = 0o660"
            ));
        }
        if self.max_ports == 0 || self.max_ports_each == 0 {
            return Err("max_ports and max_ports_each are at least 1: nobody could read".into());
        }
        if self.ring_bytes > self.max_ring_bytes {
            return Err(format!(
                "ring_bytes is {}, more than max_ring_bytes allows ({}); raise that, too",
                self.ring_bytes, self.max_ring_bytes
            ));
        }
        Ok(())
    }
}

/// A grant to be a back-end, of the command line.
fn backend_grant(text: &str) -> Result<BackendGrant, String> {
    let words = flag_words("--backend", text, ("name", "NAME,id=N,uid=N,…"))?;
    BackendGrant::of_words(words).map_err(|error| format!("--backend {text}: {error}"))
}

/// A program, of the command line: the first word is `NAME=FILE`.
pub(crate) fn program_of(text: &str) -> Result<TwinGrant, String> {
    let how = "NAME=FILE.o,open=…,attach=…";
    let Some((name, rest)) = text.split_once('=') else {
        return Err(format!("--program {text}: write {how}"));
    };
    let mut words = flag_words("--program", rest, ("file", how))?;
    words.insert("name".into(), name.to_owned());
    TwinGrant::of_words(words).map_err(|error| format!("--program {text}: {error}"))
}

/// `WORD,KEY=VALUE,…` of a flag; the first word is the value of a key of its own.
fn flag_words(
    flag: &str,
    text: &str,
    (first, how): (&'static str, &str),
) -> Result<BTreeMap<String, String>, String> {
    let mut words = BTreeMap::new();
    for (at, word) in text.split(',').enumerate() {
        let (key, value) = match word.split_once('=') {
            Some(pair) => pair,
            None if at == 0 => (first, word),
            None => return Err(format!("{flag} {text}: write {how}, not {word:?}")),
        };
        if words.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(format!("{flag} {text}: {key} is there twice"));
        }
    }
    Ok(words)
}

#[cfg(test)]
mod tests;
