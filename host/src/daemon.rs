//! From start to end: open everything, give up power, serve.
//!
//! 1. Read the configuration; open the sources (`CAP_NET_RAW`), the socket, the directories, or take those that the service
//!    manager kept or made (`vnplug_os::kept`).
//! 2. Keep `CAP_NET_RAW`, with an AF_XDP source `CAP_IPC_LOCK`, and nothing else
//!    (`sys::privileges`), but for one thread that keeps `CAP_BPF` alone if there is early drop, one for programs if they
//!    may change, and one that keeps `CAP_SYS_ADMIN` if a source is in another network namespace; switch user if asked.
//! 3. Start the sources' threads and the control loop. SIGHUP has it read its file again (`reload`). SIGTERM or SIGINT ends it: readers see
//!    their rings closed, VMs stay recorded for the next daemon. A thread that hangs keeps the daemon
//!    from that no longer than two seconds (`watch`).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FileType;
use vnplug_ring::control::Grant;
use vnplug_ring::layout::MAX_SNAPLEN;

use crate::at_once::Together;
use crate::awake::Awake;
use crate::config::{Arguments, Config, OnOff};
use crate::control::{Control, KeptGrants, KeptSources, Setup, Switches};
use crate::hub::maker::{Errands, Maker};
use crate::hub::terms::SendTerms;
use crate::hub::{Hub, Limits, Twins, user_grant};
use crate::pattern::{OpenPattern, Opened};
use crate::spec::{LINKTYPE_ETHERNET, Means, OpenSource, SourceSpec, told_timeout, untimed};
use crate::vm::Dirs;
use crate::vm::arenas::{Unplugged, packet_dir};
use crate::watch::Watch;
use vnplug_filter::{Compiler, FilterError, Jit};
use vnplug_os::kept::Kept;
use vnplug_os::namespace::Entrance;
use vnplug_os::placed::Placed;
use vnplug_os::privileges::Keep;
use vnplug_os::service::Manager;
use vnplug_os::socket::{listen, passed_listener};
use vnplug_os::{privileges, signals};
use vnplug_path::engine::loader::Loader;
use vnplug_path::engine::{Pulse, Worker};
use vnplug_path::source::early::SeatOffice;

/// Runs the daemon until it is told to end. The arguments say what is read again at SIGHUP.
///
/// # Errors
/// A text that says what could not be done and what to do about it.
pub fn run(config: Config, arguments: Arguments) -> Result<(), String> {
    vnplug_os::sigbus::prepare();
    let signal =
        |all: &[i32]| signals::descriptor(all).map_err(|error| format!("signals: {error}"));
    // Without a file there is nothing to read again.
    let (termination, hangup) = match arguments.config {
        None => (
            signal(&[signals::TERMINATION, signals::HANGUP].concat())?,
            None,
        ),
        Some(_) => (
            signal(signals::TERMINATION)?,
            Some(signal(signals::HANGUP)?),
        ),
    };
    let manager = Arc::new(Manager::here());
    let kept = Arc::new(Kept::of_environment(Arc::clone(&manager)));
    raise_descriptor_limit(config.max_ports);
    let vms_dir = config.state_dir.join("vms");
    let mut made = Vec::new();
    for dir in [&config.state_dir, &vms_dir] {
        if !dir.exists() {
            made.push(dir.clone());
        }
        std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    }
    for dir in &made {
        log::info!(target: "control", "made the directory {}", dir.display());
    }
    let passed = kept.take(CONTROL);
    // However it ends: a socket that nobody serves only misleads. The manager's is there for the next daemon.
    let ours = passed.is_none().then(|| config.socket.clone());
    let listener = match passed {
        Some(socket) => passed_listener(socket, &config.socket, config.socket_mode),
        None => listen(&config.socket, config.socket_mode),
    };
    let listener =
        listener.map_err(|error| format!("cannot serve {}: {error}", config.socket.display()))?;
    let served = own(&config, &vms_dir).and_then(|_ours| {
        serve(
            config,
            arguments,
            &made,
            (listener, ours.clone()),
            (termination, hangup),
            (&manager, &kept),
        )
    });
    remove_socket(ours.as_deref());
    if served.is_err() {
        kept.finish();
    }
    served?;
    log::info!(target: "control", "ended");
    Ok(())
}

/// Keeps other daemons from this state directory, as long as the descriptor is open: they would serve
/// the same VMs and receive into the same packet memory.
///
/// What lies in `vms` tells who may see what and which files are memory of VMs: a directory that
/// somebody else made, or may write, is not taken.
fn own(config: &Config, vms: &Path) -> Result<File, String> {
    use rustix::fs::{FlockOperation, flock};
    let state = &config.state_dir;
    // NB: the directory that only its user can open.
    let error = |error: std::io::Error| format!("{}: {error}", vms.display());
    let dir = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY)
        .open(vms)
        .map_err(error)?;
    let us = rustix::process::geteuid().as_raw();
    let user = config.user.as_deref().map(privileges::user).transpose();
    let (user, _) = user.map_err(|error| error.to_string())?.unwrap_or((us, us));
    let found = dir.metadata().map_err(error)?;
    if found.uid() != us && found.uid() != user {
        return Err(format!(
            "{} belongs to user {}: remove it, or give the daemon its own --state-dir",
            vms.display(),
            found.uid()
        ));
    }
    dir.set_permissions(std::fs::Permissions::from_mode(0o711))
        .map_err(error)?;
    match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(dir),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(format!(
            "another daemon uses {}; give this one its own --state-dir",
            state.display()
        )),
        Err(cause) => Err(error(cause.into())),
    }
}

/// From opened sources to the end; `made` are the directories that this process made.
fn serve(
    config: Config,
    arguments: Arguments,
    made: &[PathBuf],
    (listener, own_socket): (OwnedFd, Option<PathBuf>),
    (termination, hangup): (OwnedFd, Option<OwnedFd>),
    (manager, kept): (&Arc<Manager>, &Arc<Kept>),
) -> Result<(), String> {
    let user = config.user.as_deref().map(privileges::user).transpose();
    let user = user.map_err(|error| error.to_string())?;
    let dirs = Dirs {
        state: config.state_dir.clone(),
        pools: config.pool_dir.clone(),
        pool_bytes: config.pool_bytes,
    };
    let us = user.map_or(rustix::process::geteuid().as_raw(), |(user, _)| user);
    let mut policy = config.policy(us);
    let grants = KeptGrants::restore(&config.state_dir, &mut policy)?;
    // Before a source opens: frames come into packet memory at once.
    let packets = packet_dir(&dirs, user, &policy);
    // Dropped after the sources: theirs goes, too, and that of a start that failed.
    let _unplugged = Unplugged(dirs.clone());
    let kept_sources = KeptSources::restore(&config.state_dir);
    let mut added = kept_sources.specs();
    added.retain(|spec| {
        let is_other = config.sources.iter().any(|it| it.name() == spec.name());
        if is_other {
            log::warn!(target: "source", "source {:?} is kept, and is another one in the configuration", spec.name());
        }
        !is_other
    });
    let all_sources = || config.sources.iter().chain(&added);
    if let Some(told) = told_timeout(all_sources()) {
        log::info!(target: "source", "{told}");
    }
    let mut twins = Twins::load(&config.programs)?;
    let means = Means {
        files: Some(packets),
        user,
        programs: twins.of_sources(),
        entrance: Arc::default(),
        kept: Arc::clone(kept),
        seats: SeatOffice::default(),
        errands: Errands::default(),
        is_late: false,
        untimed: untimed(all_sources()),
    };
    let mut switches = Switches::new(&config.state_dir);
    let open_one = |spec: &SourceSpec| open_as_set(spec, &switches, &means);
    let mut opened = Opened::all(&config.sources, open_one)?;
    for one in Opened::each(&added, open_one) {
        match one {
            Ok(one) => opened.push_back(one),
            // The daemon does not fail for what was added once.
            Err(error) => log::error!(target: "source", "{error}: it was added and is kept"),
        }
    }
    let (mut open, mut patterns) = (Together::default(), Vec::new());
    while let Some(one) = opened.pop_front() {
        match one {
            Opened::One(source) => open.push_back(*source),
            Opened::Many(pattern) => patterns.push(*pattern),
        }
    }
    let in_kernel = open.iter().filter_map(OpenSource::program_in_kernel);
    in_kernel.for_each(|(program, place)| twins.runs_at(program, place));
    if open.is_empty() && patterns.is_empty() {
        log::warn!(target: "source", "no source is configured; use --source or --switch, or a [[source]] table");
    }
    let awake = config.wake_us.map(Awake::open).transpose();
    let awake =
        awake.map_err(|error| format!("cannot have CPUs wake sooner (wake_us): {error}"))?;
    give_files_to(user, &listener, made, &config)?;
    let mut compiler = Compiler::new("/proc/self/exe".into());
    if let Err(error) = compiler.start() {
        log::warn!(target: "filter", "filters cannot be compiled now: {error}");
    }
    check_grants(&config, &mut compiler)?;
    let mut keep = vec![Keep::NetRaw];
    if open.iter().any(OpenSource::locks_memory) {
        keep.push(Keep::IpcLock);
    }
    let mut early = Vec::new();
    let drops = open.iter_mut().any(OpenSource::may_drop_early);
    if drops || patterns.iter().any(OpenPattern::may_drop_early) {
        early.push(Keep::Bpf);
    }
    if open.iter_mut().any(OpenSource::narrows_xdp) {
        early.push(Keep::NetAdmin);
    }
    let programs = match config.change_programs {
        // With the last two it opens AF_XDP sources, too.
        OnOff::On => vec![Keep::Bpf, Keep::NetAdmin, Keep::NetRaw, Keep::IpcLock],
        OnOff::Off => Vec::new(),
    };
    let entrance = Arc::clone(&means.entrance);
    let enters = all_sources().any(SourceSpec::enters);
    let enters = enters.then_some(&*entrance);
    let (loader, maker) = give_up_power(&keep, user, early, programs, enters)
        .map_err(|error| format!("cannot give up privileges: {error}"))?;
    if let Some(loader) = &loader {
        loader.staff(&means.seats);
    }
    must_write(&config.state_dir.join("vms"), "--state-dir")?;
    must_write(&config.pool_dir, "--pool-dir")?;

    let jit = match config.jit {
        OnOff::On => Jit::start(config.jit_bytes),
        OnOff::Off => Jit::off(),
    };
    let mut hub = Hub::new(Limits {
        ports: config.max_ports,
        ports_each: config.max_ports_each,
        user_bytes: config.max_user_bytes,
        ring_bytes: config.ring_bytes,
        max_ring_bytes: config.max_ring_bytes,
    });
    hub.jit = jit.clone();
    hub.twins = twins;
    config.check_terms()?;
    for source in open.iter() {
        if let Some(board) = source.board() {
            let joiners: Vec<_> = policy.joiners(source.name()).collect();
            if !joiners.is_empty() {
                board.grant(joiners.into_iter().filter_map(user_grant).collect());
            }
            switches.restore(source.spec(), board);
        }
    }
    for number in 0..=u16::MAX {
        let Some(source) = open.pop_front() else {
            break;
        };
        hub.add_source(source.start(number).map_err(|error| error.to_string())?);
    }
    if let Some(loader) = loader {
        hub.drop_early(loader);
    }
    let users = config.users.iter().map(|(_, grant)| &grant.source);
    let vms = config.vms.iter().map(|(_, grant)| &grant.source);
    let senders = config.senders.iter().map(|sending| &sending.source);
    let switches_named = config.joiners.iter().map(|join| &join.switch);
    let named = users.chain(vms).chain(senders).chain(switches_named);
    let has_patterns = !patterns.is_empty();
    let is_pattern = |name: &str| patterns.iter().any(|it| it.name() == name);
    let named = named.filter(|name| !is_pattern(name));
    named.for_each(|it| warn_unknown(&hub, it));
    let workers = hub.sources().iter().flat_map(|source| &source.workers);
    let last = last_things(own_socket, dirs.clone());
    let watch = Watch::default();
    watch.add(workers.map(Worker::line));
    let pulse = Arc::new(Pulse::new("control", "serving"));
    pulse.sleep(0);
    let theirs = (Arc::clone(&pulse), Arc::clone(manager));
    let termination = watch
        .start(termination, theirs.0, theirs.1, last)
        .map_err(|error| format!("cannot start vnplug-watch: {error}"))?;
    let socket = config.socket.clone();
    let read_again = move || {
        let config = Config::load(arguments.clone())?;
        look_through(&config).map(|()| config)
    };
    let setup = Setup {
        hub,
        policy,
        dirs,
        compiler,
        jit,
        awake,
        switches,
        grants,
        maker,
        kept_sources,
        config,
        patterns,
        read_again: Arc::new(read_again),
        user,
        seats: means.seats.clone(),
        entrance,
        kept: Arc::clone(kept),
        watch,
        listener,
        termination,
        pulse,
    };
    let control = Control::new(setup).map_err(|error| format!("cannot start: {error}"))?;
    if let Some(hangup) = hangup {
        crate::hangup::start(hangup, socket.clone(), Arc::clone(manager))
            .map_err(|error| format!("cannot start vnplug-hangup: {error}"))?;
    }
    kept.settle();
    let_go(kept, has_patterns);
    log::info!(target: "control", "serving {}", socket.display());
    manager.say_ready("Serving");
    control
        .run()
        .map_err(|error| format!("the control loop failed: {error}"))
}

/// Opens a source; a switch with the entrances that were set at run time, but for those that cannot be any more.
fn open_as_set(spec: &SourceSpec, switches: &Switches, means: &Means) -> Result<Opened, String> {
    let mut all = switches.kept_entrances(spec);
    let error = match Opened::open(&spec.with(&all), means) {
        Err(error) if !all.is_empty() => error,
        opened => return opened,
    };
    // What is wrong without any of them is not theirs.
    drop(Opened::open(spec, means)?);
    let mut possible = Vec::new();
    for text in all.drain(..) {
        possible.push(text);
        if Opened::open(&spec.with(&possible), means).is_err() {
            let text = possible.pop();
            log::error!(target: "source", "{error}: {text:?} was set at run time, and is left out");
        }
    }
    Opened::open(&spec.with(&possible), means)
}

/// What must be done when the process ends without its threads, as it would be if they ended.
fn last_things(socket: Option<PathBuf>, dirs: Dirs) -> impl FnOnce() {
    move || {
        remove_socket(socket.as_deref());
        drop(Unplugged(dirs));
    }
}

/// Lets go of what was kept for sources that there are no more. A pattern's sources come later.
fn let_go(kept: &Arc<Kept>, has_patterns: bool) {
    let own = Arc::clone(kept);
    let later = move || {
        std::thread::sleep(PATTERNS);
        own.let_go();
    };
    let begun = has_patterns.then(|| {
        std::thread::Builder::new()
            .name("vnplug-kept".into())
            .spawn(later)
    });
    if !matches!(begun, Some(Ok(_))) {
        kept.let_go();
    }
}

/// Removes the control socket, if it is the daemon's own.
fn remove_socket(own: Option<&Path>) {
    if let Some(path) = own
        && let Err(error) = std::fs::remove_file(path)
    {
        log::warn!(target: "control", "{}: {error}", path.display());
    }
}

/// Keeps what is needed from now on, and starts the threads that keep more, each with what it needs alone: those that have the
/// kernel verify filters, if there is early drop, and operators' programs, if they may change, and that by which network
/// namespaces are entered, if sources name some.
fn give_up_power(
    keep: &[Keep],
    user: Option<(u32, u32)>,
    early: Vec<Keep>,
    programs: Vec<Keep>,
    entrance: Option<&Entrance>,
) -> std::io::Result<(Option<Loader>, Option<Maker>)> {
    let enters = entrance.map_or(&[][..], |_| &[Keep::SysAdmin]);
    privileges::drop_all_but(&[keep, &early, &programs, enters].concat(), user)?;
    if let Some(entrance) = entrance {
        entrance.keep()?;
    }
    let only = |thread: &'static str, kept: Vec<Keep>| {
        move || {
            if let Err(error) = privileges::keep_only(&kept) {
                log::error!(target: "control", "{thread} keeps more than it needs: {error}");
            }
        }
    };
    let loader = match early.is_empty() {
        true => None,
        false => Some(Loader::start(only("vnplug-early", early))?),
    };
    let maker = match programs.is_empty() {
        true => None,
        false => Some(Maker::start(only("vnplug-programs", programs))?),
    };
    privileges::keep_only(keep)?;
    Ok((loader, maker))
}

/// Whether the user that the daemon now is may make files in a directory.
fn must_write(dir: &Path, flag: &str) -> Result<(), String> {
    use rustix::fs::{Access, access};
    access(dir, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| {
        let user = rustix::process::geteuid().as_raw();
        let dir = dir.display();
        format!(
            "{dir}: {error}: user {user} must be able to make files in it; give the directory to \
             that user or name another one with {flag}"
        )
    })
}

/// Says whether a configuration is right, as far as that can be known without opening its sources.
///
/// # Errors
/// A text that says what is wrong.
pub fn check(config: &Config) -> Result<(), String> {
    look_through(config)?;
    let sources = config.sources.len();
    log::info!(target: "control", "the configuration is right; {sources} sources");
    if let Some(told) = told_timeout(config.sources.iter()) {
        log::info!(target: "source", "{told}");
    }
    Ok(())
}

/// Has the daemon that listens where this configuration says read it again, and waits until it is in force.
///
/// # Errors
/// A text that says why it is not; the daemon goes on as before.
pub fn reload(config: &Config) -> Result<(), String> {
    crate::hangup::ask_again(&config.socket)
}

/// What is wrong with a configuration, as far as that can be known without opening its sources.
fn look_through(config: &Config) -> Result<(), String> {
    let user = config.user.as_deref().map(privileges::user);
    user.transpose().map_err(|error| error.to_string())?;
    let group = config.socket_group.as_deref().map(privileges::group);
    group.transpose().map_err(|error| error.to_string())?;
    config.check_terms()?;
    let means = Means::default();
    for spec in config.sources.iter().filter(|it| it.is_switch()) {
        let options = spec.entrances_and_settings(&means);
        options.map_err(|error| spec.blame(&error, &means))?;
    }
    let mut compiler = Compiler::new("/proc/self/exe".into());
    check_grants(config, &mut compiler)
}

/// Refuses grants whose filters are wrong: their readers would be refused, and not know why. Says of others that nobody has them.
fn check_grants(config: &Config, compiler: &mut Compiler) -> Result<(), String> {
    for (kind, given) in config.policy(0).grants() {
        if let Err(why) = given.must_be_one(&given.written(kind)) {
            log::warn!(target: "control", "{why}");
        }
    }
    let users = config.users.iter().map(|(_, grant)| grant);
    let vms = config.vms.iter().map(|(_, grant)| grant);
    let senders = config.senders.iter().map(|sending| Grant {
        source: sending.source.clone(),
        filter: sending
            .terms
            .parse::<SendTerms>()
            .unwrap_or_default()
            .filter,
    });
    for Grant { source, filter } in &users.chain(vms).cloned().chain(senders).collect::<Vec<_>>() {
        match compiler.compile(filter, MAX_SNAPLEN, LINKTYPE_ETHERNET) {
            Ok(_) => {}
            Err(
                error @ (FilterError::Refused(_)
                | FilterError::TooLong { .. }
                | FilterError::Nul { .. }
                | FilterError::BadProgram(_)),
            ) => {
                return Err(format!(
                    "the filter {filter:?} of a grant for {source:?}: {error}"
                ));
            }
            // Perhaps of this moment.
            Err(error) => {
                log::warn!(target: "filter", "the filter {filter:?} of a grant for {source:?}: {error}");
            }
        }
    }
    Ok(())
}

fn warn_unknown(hub: &Hub, name: &str) {
    let known = hub.sources().iter().any(|source| source.name == name);
    let is_port = || hub.find(name).is_ok_and(|named| named.port.is_some());
    if name != "*" && !known && !is_port() {
        log::warn!(target: "control", "a grant names {name:?}, which is no source");
    }
}

/// What the daemon made as root and needs as the other user. A directory that was there before is
/// somebody's, and stays so.
fn give_files_to(
    user: Option<(u32, u32)>,
    listener: &OwnedFd,
    made: &[PathBuf],
    config: &Config,
) -> Result<(), String> {
    let group = config
        .socket_group
        .as_deref()
        .map(privileges::group)
        .transpose()
        .map_err(|error| error.to_string())?;
    let uid = user.map(|(uid, _)| uid);
    let of_user = user.map(|(_, gid)| gid);
    let in_path = |path: &Path, error| format!("{}: {error}", path.display());
    // By descriptors: the user may have put a link to something else in its place.
    if uid.is_some() || group.is_some() {
        let socket = Placed::of_socket(listener, &config.socket);
        let given = socket.and_then(|it| it.give(uid, group.or(of_user)));
        given.map_err(|error| in_path(&config.socket, error))?;
    }
    let us = rustix::process::geteuid().as_raw();
    for dir in made.iter().filter(|_| uid.is_some()) {
        let found = Placed::open(dir).map_err(|error| in_path(dir, error))?;
        if found.kind() != FileType::Directory || found.owner() != us {
            return Err(format!("{} is not what was made", dir.display()));
        }
        let given = found.give(uid, of_user);
        given.map_err(|error| in_path(dir, error))?;
    }
    Ok(())
}

/// A port with a connection of its own takes two descriptors, and ports in a bundle none; ten thousand
/// ports must not end at the shell's limits.
fn raise_descriptor_limit(ports: usize) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let hard = getrlimit(Resource::Nofile).maximum;
    let needed = ports as u64 * 2 + OTHER_FILES;
    let limit = |most: Option<u64>| Rlimit {
        current: most,
        maximum: most,
    };
    // Only root may go beyond the hard limit.
    if hard.is_some_and(|hard| hard < needed)
        && setrlimit(Resource::Nofile, limit(Some(needed))).is_ok()
    {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, limit(hard)) {
        log::warn!(target: "control", "cannot raise the limit of open files: {error}");
    } else if let Some(hard) = hard.filter(|hard| *hard < needed) {
        let room = hard.saturating_sub(OTHER_FILES) / 2;
        log::info!(
            target: "control",
            "{hard} open files are allowed, enough for {room} ports with connections of their own \
             (max_ports is {ports}): LimitNOFILE={needed} in the service file allows all"
        );
    }
}

/// By when a pattern has opened the sources of interfaces that there are.
const PATTERNS: Duration = Duration::from_secs(10);
/// What the control socket is called that a service manager made (`FileDescriptorName=`).
const CONTROL: &str = "control";
/// Sources, VMs, connections without ports.
const OTHER_FILES: u64 = 1_024;
