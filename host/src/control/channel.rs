//! VMs as the control thread sees them: attaching, channels, wake-ups.

use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use vnplug_ring::control::{Message, VmReady, VmSpec, code};

use super::Control;
use super::groups::name_sources;
use super::memory::{LARGE, Want};
use super::session::{Over, Session};
use crate::hub::{Peer, Refusal};
use crate::vm::{Committed, Vm, VmPlan};
use vnplug_os::closer::PeerFd;
use vnplug_os::event;
use vnplug_os::peer_log;

/// What is asked of who has not said Hello.
pub(super) const GREET_FIRST: &str = "say Hello first";
/// Why a VM that is held has no ports.
pub(super) const MOVES: &str = "the machine moves";

/// What becomes of an attach.
pub(super) enum Attaching {
    /// The answer.
    Done(Message),
    /// What has to be made first, and for whom.
    Waits(Want, VmSpec),
}

impl Control {
    /// Makes a VM known, or confirms one that is.
    ///
    /// A VM whose control channel is open is its owner's alone: two machines in one pool would read
    /// each other's packets. Without a channel the name may be taken over; another owner gets a
    /// pool of its own, for a machine that lost its channel may still map the old one.
    ///
    /// Gives the answer, or what to wait for: a new VM's pool has to be made first.
    pub(super) fn attach_vm(&mut self, token: u64, mut spec: VmSpec) -> Result<Attaching, Refusal> {
        for grant in spec.allow.iter().filter(|grant| grant.source != "*") {
            let sources = self.hub.sources();
            if sources.iter().all(|source| source.name != grant.source) {
                let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
                let what = format!(
                    "no source {:?} to allow; there are: {}",
                    grant.source,
                    names.join(", ")
                );
                return Err(Refusal::new(code::NOT_FOUND, what));
            }
        }
        name_sources(&mut spec);
        let anonymous = spec.owner == 0;
        if anonymous {
            // Nobody knows this number, so nobody comes again while the channel is open.
            spec.owner = event::random().max(1);
        }
        if let Some(vm) = self.vms.get(&spec.name) {
            let same = vm.owner() == spec.owner;
            if !same && vm.channel.is_some() {
                let name = &spec.name;
                let what =
                    format!("VM {name:?} is running; choose another name or detach it first");
                return Err(Refusal::new(code::EXISTS, what));
            }
            if same || anonymous {
                spec.allow = vm.left_of(std::mem::take(&mut spec.allow));
                // What the VM sees of the sources of its groups may not change under the others.
                self.wanted_groups(&spec)?;
                let Some(vm) = self.vms.served.get_mut(&spec.name) else {
                    return Err(Refusal::new(code::INTERNAL, "the VM is gone"));
                };
                vm.readopt(&spec, &self.vms.dirs.state)?;
                let ready = vm.ready(&self.vms.dirs.state);
                self.claim(token, &spec);
                self.judge_again(&spec.name);
                return Ok(Attaching::Done(Message::VmReady(ready)));
            }
            log::info!(target: "vm", "VM {:?} is taken over", spec.name);
            self.detach_vm(&spec.name)?;
        }
        self.vms.must_obey(&spec.name, spec.owner)?;
        self.vms.may_attach(&spec.name)?;
        let groups = self.wanted_groups(&spec)?;
        let plan = VmPlan::new(&spec, groups, &self.vms.dirs)?;
        // Last: an attach that is refused leaves its bars.
        self.forget_broken(&spec.name);
        self.vms.making(&plan);
        Ok(Attaching::Waits(Want::Pool(Box::new(plan)), spec))
    }

    /// Makes a VM known whose pool was made, for the connection that waits for it.
    pub(super) fn attached(
        &mut self,
        token: u64,
        spec: &VmSpec,
        plan: VmPlan,
        made: std::io::Result<Committed>,
    ) -> Result<Message, Refusal> {
        let (pool, arenas) = match made {
            Ok(made) => (Ok(made.pool), made.arenas),
            Err(error) => (Err(error), Vec::new()),
        };
        if pool.is_ok()
            && let Err(refusal) = self.admit_new(spec, &plan, arenas)
        {
            self.expel(&spec.name);
            plan.abandon();
            return Err(refusal);
        }
        let vm = Vm::create(plan, pool, &self.vms.dirs).inspect_err(|_| self.expel(&spec.name))?;
        let ready = vm.ready(&self.vms.dirs.state);
        log::info!(target: "vm", "VM {:?} is attached ({})", spec.name, vm.kind());
        self.add_vm(vm)
            .map_err(|error| Refusal::new(code::INTERNAL, error.to_string()))?;
        self.claim(token, spec);
        Ok(Message::VmReady(ready))
    }

    /// Notes that this connection attached a VM: it may hand over its channel.
    fn claim(&mut self, token: u64, spec: &VmSpec) {
        if let Some(session) = self.sessions.get_mut(token) {
            session.attached.retain(|(name, _)| *name != spec.name);
            session.attached.push((spec.name.clone(), spec.owner));
        }
    }

    /// Forgets a VM for its owner; 0 is an operator who names any VM.
    pub(super) fn detach_own_vm(&mut self, name: &str, owner: u64) -> Result<(), Refusal> {
        let other = |vm: &Vm| owner != 0 && vm.owner() != owner;
        if self.vms.get(name).is_some_and(other) {
            let what = format!("VM {name:?} was attached by somebody else meanwhile");
            return Err(Refusal::new(code::EXISTS, what));
        }
        self.vms.must_obey(name, owner)?;
        self.detach_vm(name)
    }

    /// Closes the ports of a VM and has none opened, or ends that. It stays known. Who has its ports is told, and
    /// what it maps of the pool is not free before it says so.
    pub(super) fn hold_vm(
        &mut self,
        token: u64,
        (name, owner): (&str, u64),
        held: bool,
    ) -> Result<VmReady, Refusal> {
        let Some(vm) = self.vms.served.get_mut(name) else {
            let what = format!("no VM {name:?} is attached");
            return Err(Refusal::new(code::NOT_FOUND, what));
        };
        if owner != 0 && vm.owner() != owner {
            let what = format!("VM {name:?} was attached by another machine");
            return Err(Refusal::new(code::EXISTS, what));
        }
        let ready = vm.ready(&self.vms.dirs.state);
        if !held {
            vm.set_held(None, &self.vms.dirs.state)?;
            log::info!(target: "vm", "VM {name:?} is let go");
            return Ok(ready);
        }
        let mut read = vm.held().cloned().unwrap_or_default();
        let viewer = Peer::Vm(name.to_owned());
        let mut over = Vec::new();
        for (port, source) in self.hub.read_by(&viewer) {
            over.push((port, viewer.clone()));
            read.insert(source.to_owned());
        }
        vm.set_held(Some(read), &self.vms.dirs.state)?;
        log::info!(target: "vm", "VM {name:?} is held");
        self.end_ports(token, &over, MOVES);
        Ok(ready)
    }

    /// Serves a VM from now on.
    pub(super) fn add_vm(&mut self, vm: Vm) -> std::io::Result<()> {
        let name = vm.name().to_owned();
        let watched = self.vms.add(vm, &mut self.sessions);
        if watched.is_err()
            && let Err(refusal) = self.detach_vm(&name)
        {
            log::error!(target: "vm", "VM {name:?}: {}", refusal.text);
        }
        Ok(watched?)
    }

    /// Forgets a VM and closes its ports.
    pub(super) fn detach_vm(&mut self, name: &str) -> Result<(), Refusal> {
        if self.forget_broken(name) {
            return Ok(());
        }
        let Some(vm) = self.vms.get(name) else {
            let what = match self.vms.is_attaching(name) {
                true => format!("VM {name:?} is still being attached"),
                false => format!("no VM {name:?} is attached"),
            };
            return Err(Refusal::new(code::NOT_FOUND, what));
        };
        if let Some(token) = vm.channel {
            self.end(token, &Over::Closed);
        }
        self.close_now(&Peer::Vm(name.to_owned()));
        self.pool_gone(name);
        if let Some(vm) = self.vms.remove(name, &self.sessions) {
            let bytes = vm.pool_bytes();
            let groups = vm.groups().to_vec();
            let memory = vm.dissolve(&self.vms.dirs.state);
            if bytes >= LARGE {
                self.jobs.discard(memory, bytes);
            }
            self.expel(name);
            self.remove_orphans(&groups);
            log::info!(target: "vm", "VM {name:?} is detached");
        }
        Ok(())
    }

    /// Takes a descriptor as the control channel of a VM.
    pub(super) fn adopt(
        &mut self,
        token: u64,
        name: &str,
        gift: Option<PeerFd>,
    ) -> Result<(), Refusal> {
        let invalid = |what: &str| Refusal::new(code::INVALID, what.to_owned());
        let fd = gift.ok_or_else(|| invalid("Adopt takes one descriptor, none came"))?;
        // NB: not fstat, which asks the file's server.
        let is_stream = socket_type(&fd) == Ok(SocketType::STREAM);
        if !is_stream || socket_domain(&fd) != Ok(AddressFamily::UNIX) {
            return Err(invalid(
                "the descriptor of a control channel must be a Unix stream socket",
            ));
        }
        let Some(vm) = self.vms.get(name) else {
            let what = format!("no VM {name:?} is attached");
            return Err(Refusal::new(code::NOT_FOUND, what));
        };
        let mine = (name.to_owned(), vm.owner());
        let claimed = |session: &Session| session.attached.contains(&mine);
        if !self.sessions.get(token).is_some_and(claimed) {
            let what = format!("VM {name:?} is not attached over this connection: attach it first");
            return Err(Refusal::new(code::EXISTS, what));
        }
        self.take_channel(name, fd.into_owned());
        Ok(())
    }

    /// Somebody connected to a VM's socket: QEMU's chardev, or its doorbell device.
    pub(super) fn accept_vm(&mut self, token: u64) {
        let Some((name, doorbell)) = self.vms.who_listens(token).cloned() else {
            return;
        };
        let fd = match self.accept_on(token) {
            Ok(Some(fd)) => fd,
            Ok(None) => return,
            Err(error) => {
                self.refuse_for_want_of_descriptors(token, &error);
                return;
            }
        };
        if !doorbell {
            self.take_channel(&name, fd);
            return;
        }
        if let Some(server) = self.vms.get_mut(&name).and_then(|vm| vm.doorbell.as_mut()) {
            match server.greet(fd) {
                Ok(()) => {
                    peer_log!(
                        log::Level::Info,
                        "vm",
                        "VM {name:?}: its doorbell is plugged"
                    );
                }
                Err(error) => {
                    peer_log!(log::Level::Warn, "vm", "VM {name:?}: doorbell: {error}");
                }
            }
        }
    }

    fn take_channel(&mut self, name: &str, fd: OwnedFd) {
        if let Some(old) = self.vms.get(name).and_then(|vm| vm.channel) {
            self.end(
                old,
                &Over::Misbehaved("a newer control channel replaces it"),
            );
        }
        let viewer = Peer::Vm(name.to_owned());
        let fd = self.peer_socket(fd, &viewer);
        let bucket = self.sessions.bucket_of(&viewer, false);
        let mut session = Session::new(fd, viewer, true, bucket, Instant::now());
        if self.vms.get(name).is_some_and(|vm| vm.kind() == "uml") {
            session.expect_acknowledgements();
        }
        let token = self.sessions.add(session);
        // A machine of User-mode Linux stays where it is.
        let may_have_moved = self.vms.get(name).is_some_and(|vm| vm.kind() != "uml");
        if let Some(vm) = self.vms.get_mut(name) {
            vm.channel = token;
            peer_log!(
                log::Level::Info,
                "vm",
                "VM {name:?}: its control channel is open"
            );
        }
        if let Some(token) = token.filter(|_| may_have_moved) {
            self.ask_for_greeting(token);
        }
    }

    /// Asks whoever hears this channel to say Hello: the agent of a machine that came here with its memory and its
    /// devices takes us for the daemon that it spoke to elsewhere.
    fn ask_for_greeting(&mut self, token: u64) {
        let Some(session) = self.sessions.get_mut(token) else {
            return;
        };
        let request = Message::Gone {
            port: 0,
            reason: GREET_FIRST.into(),
        };
        match session.say(&request, 0, 0, Vec::new()) {
            Ok(()) => self.sessions.rearm(token),
            Err(over) => self.end(token, &over),
        }
    }

    /// Somebody rang: compiled filters, memory that was made, and readers in VMs to be woken.
    pub(super) fn bell(&mut self) {
        event::clear(&self.bell);
        self.done();
        self.read_again();
        self.programs_made();
        self.opened_sources();
        self.entrances_changed();
        self.patterns_told();
        // Of many VMs few have news, and only those are named.
        let rung = self.vms.served.iter().filter(|(_, vm)| vm.is_rung());
        let names: Vec<String> = rung.map(|(name, _)| name.clone()).collect();
        for name in names {
            self.wake_readers(&name);
        }
    }

    /// Tells a VM's agent which readers to wake. While earlier messages wait for the channel, bells
    /// stay rung; this is called again when the channel was served.
    pub(super) fn wake_readers(&mut self, name: &str) {
        let Some((vm, token)) = self.vms.get(name).and_then(|vm| Some((vm, vm.channel?))) else {
            return;
        };
        let Some(session) = self.sessions.get_mut(token) else {
            return;
        };
        if session.has_queued() {
            return;
        }
        let ports = vm.take_rung();
        if ports.is_empty() {
            return;
        }
        match session.say(&Message::Wake(ports), 0, 0, Vec::new()) {
            Ok(()) => self.sessions.rearm(token),
            Err(over) => self.end(token, &over),
        }
    }

    /// Drops VMs whose pool was truncated under us.
    pub(super) fn drop_lost_vms(&mut self) {
        self.hub.bar_lost_host_groups();
        for name in self.vms.lost() {
            log::error!(target: "vm", "VM {name:?}: its pool was truncated; it is detached");
            if let Err(refusal) = self.detach_vm(&name) {
                log::error!(target: "vm", "VM {name:?}: {}", refusal.text);
            }
        }
    }
}
