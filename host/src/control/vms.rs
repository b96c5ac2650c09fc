//! The VMs that are attached, those of an earlier daemon that cannot be served, and those that are
//! being made.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use vnplug_ring::control::{Counted, Grant, VmSpec, code};

use super::session::Session;
use super::sessions::Sessions;
use crate::hub::{Peer, Refusal};
use crate::vm::{Broken, Dirs, Vm, VmPlan};
use vnplug_os::peer_log;

/// VMs in all.
const MAX_VMS: usize = 1_024;

/// The VMs.
pub(super) struct Vms {
    pub(super) dirs: Dirs,
    pub(super) served: HashMap<String, Vm>,
    /// VMs of an earlier daemon that cannot be served.
    pub(super) broken: Vec<Broken>,
    /// Names of VMs whose pools are being made.
    attaching: HashSet<String>,
    /// Names of groups of the host whose arenas are being made.
    making_groups: HashSet<String>,
    /// Listeners of VMs by token: name, and whether it is the doorbell's.
    listeners: HashMap<u64, (String, bool)>,
    locked_down: LockedDown,
}

/// Why nothing is done with a VM, or to its grants, while its pool is made.
pub(super) fn being_attached(name: &str) -> Refusal {
    let what = format!("VM {name:?} is being attached; try again later");
    Refusal::new(code::EXISTS, what)
}

/// The machines whose agents said that the kernel lets nobody map a PCI memory: by the VM's name, whose machine it is.
///
/// The word of a machine holds until its agent says otherwise, also if it falls silent, and over a detach: memory of the
/// other kind is mapped by any kernel, so a word that is old does less harm than one that was forgotten.
#[derive(Debug, Default)]
pub(super) struct LockedDown(HashMap<String, u64>);

impl LockedDown {
    /// What the agent of the machine `owner` says; true if that is new.
    fn note(&mut self, name: &str, owner: u64, is_so: bool) -> bool {
        if !is_so {
            self.0.remove(name);
            return false;
        }
        if self.0.len() >= MAX_VMS && !self.0.contains_key(name) {
            // Of machines that are gone nobody says so.
            self.0.clear();
        }
        self.0.insert(name.to_owned(), owner) != Some(owner)
    }

    fn is_noted(&self, name: &str, owner: u64) -> bool {
        self.0.get(name) == Some(&owner)
    }
}

impl Vms {
    /// None is served yet.
    pub(super) fn new(dirs: Dirs, broken: Vec<Broken>) -> Self {
        Self {
            dirs,
            served: HashMap::new(),
            broken,
            attaching: HashSet::new(),
            making_groups: HashSet::new(),
            listeners: HashMap::new(),
            locked_down: LockedDown::default(),
        }
    }

    /// What a VM's agent says of whether its kernel is locked down.
    pub(super) fn hear_locked_down(&mut self, viewer: &Peer, is_so: bool) {
        let Some(vm) = self.of(viewer).filter(|vm| is_so || vm.kind() == "qemu") else {
            // What maps the other kind of memory says nothing of this one.
            return;
        };
        let (name, owner) = (vm.name().to_owned(), vm.owner());
        if self.locked_down.note(&name, owner, is_so) {
            peer_log!(
                log::Level::Warn,
                "vm",
                "VM {name:?}: its guest's kernel is locked down and maps no PCI memory: run `vnplug attach qemu` for it \
                 again, without --memory, and it gets the other kind"
            );
        }
    }

    /// A VM that is served.
    pub(super) fn get(&self, name: &str) -> Option<&Vm> {
        self.served.get(name)
    }

    /// A VM that is served.
    pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut Vm> {
        self.served.get_mut(name)
    }

    /// The VM behind a viewer.
    pub(super) fn of(&self, viewer: &Peer) -> Option<&Vm> {
        match viewer {
            Peer::Vm(name) => self.get(name),
            Peer::User(_) => None,
        }
    }

    /// The VM behind a viewer.
    pub(super) fn of_mut(&mut self, viewer: &Peer) -> Option<&mut Vm> {
        match viewer {
            Peer::Vm(name) => self.get_mut(name),
            Peer::User(_) => None,
        }
    }

    /// Whether this viewer is a VM that is held: nothing is opened for it.
    pub(super) fn is_held(&self, viewer: &Peer) -> bool {
        self.of(viewer).is_some_and(|vm| vm.held().is_some())
    }

    /// What a VM was granted when it was attached.
    pub(super) fn grants(&self, viewer: &Peer) -> Vec<Grant> {
        self.of(viewer).map(Vm::grants).unwrap_or_default()
    }

    /// The VM of an earlier daemon that has this name and could not be served.
    pub(super) fn not_served(&self, name: &str) -> Option<&Broken> {
        self.broken.iter().find(|vm| vm.name == name)
    }

    /// Refuses the name of a VM that could not be served, unless it obeys who asks. Whether the machine
    /// still runs is not known: the name is as taken as a running one's.
    pub(super) fn must_obey(&self, name: &str, owner: u64) -> Result<(), Refusal> {
        match self.not_served(name) {
            Some(vm) if !vm.obeys(owner) => {
                let why = &vm.why;
                let what = format!(
                    "VM {name:?} cannot be served ({why}) and may run, with memory of ours: choose \
                     another name, or detach it first (vnplug detach)"
                );
                Err(Refusal::new(code::EXISTS, what))
            }
            _ => Ok(()),
        }
    }

    /// Refuses another VM whose name is being taken, or that is too many.
    pub(super) fn may_attach(&self, name: &str) -> Result<(), Refusal> {
        if self.is_attaching(name) {
            return Err(being_attached(name));
        }
        if self.served.len() + self.attaching.len() >= MAX_VMS {
            let what = format!("{MAX_VMS} VMs are attached, the limit");
            return Err(Refusal::new(code::LIMIT, what));
        }
        Ok(())
    }

    /// Its pool is being made.
    pub(super) fn is_attaching(&self, name: &str) -> bool {
        self.attaching.contains(name)
    }

    /// The arenas of this group of the host are being made.
    pub(super) fn is_making_group(&self, name: &str) -> bool {
        self.making_groups.contains(name)
    }

    /// Its pool and its groups' arenas are being made. Nobody else makes one of these names until the
    /// thread is done with them, also if who asked for it goes away.
    pub(super) fn making(&mut self, plan: &VmPlan) {
        let groups = plan.new_groups().map(|group| group.name.clone());
        self.making_groups.extend(groups);
        self.attaching.insert(plan.name().to_owned());
    }

    /// They are made, or given up.
    pub(super) fn made(&mut self, plan: &VmPlan) {
        self.attaching.remove(plan.name());
        for group in plan.new_groups() {
            self.making_groups.remove(&group.name);
        }
    }

    /// Nothing was made of it.
    pub(super) fn never_made(&mut self, spec: &VmSpec) {
        self.attaching.remove(&spec.name);
        for group in &spec.groups {
            self.making_groups.remove(&group.name);
        }
    }

    /// Takes up a VM, and listens for it.
    pub(super) fn add(&mut self, vm: Vm, sessions: &mut Sessions) -> rustix::io::Result<()> {
        let name = vm.name().to_owned();
        // Known first, so that what fails here can be detached.
        let vm = self.served.entry(name.clone()).insert_entry(vm).into_mut();
        let listeners = [
            Some(vm.listener.as_fd()),
            vm.doorbell.as_ref().map(|it| it.listener.as_fd()),
        ];
        let mut all = Ok(());
        for (doorbell, listener) in [false, true].into_iter().zip(listeners) {
            let Some(listener) = listener else { continue };
            let (token, watched) = sessions.watch_new(listener);
            all = all.and(watched);
            self.listeners.insert(token, (name.clone(), doorbell));
        }
        all
    }

    /// Forgets a VM that is served, and listens for it no more.
    pub(super) fn remove(&mut self, name: &str, sessions: &Sessions) -> Option<Vm> {
        let vm = self.served.remove(name)?;
        self.listeners.retain(|_, (owner, _)| owner != name);
        sessions.unwatch(vm.listener.as_fd());
        if let Some(server) = &vm.doorbell {
            sessions.unwatch(server.listener.as_fd());
        }
        Some(vm)
    }

    /// Whose listener it is, and whether it is the doorbell's.
    pub(super) fn who_listens(&self, token: u64) -> Option<&(String, bool)> {
        self.listeners.get(&token)
    }

    /// A listener.
    pub(super) fn listener(&self, token: u64) -> Option<BorrowedFd<'_>> {
        let (name, doorbell) = self.listeners.get(&token)?;
        let vm = self.get(name)?;
        if *doorbell {
            vm.doorbell.as_ref().map(|server| server.listener.as_fd())
        } else {
            Some(vm.listener.as_fd())
        }
    }

    /// Whether a VM has this file.
    pub(super) fn has_plugged(&self, path: &Path) -> bool {
        let served = self.served.values().flat_map(Vm::groups);
        let mut all = served.chain(self.broken.iter().flat_map(|vm| &vm.groups));
        all.any(|group| group.path == path)
    }

    /// VMs whose pool was truncated under us.
    pub(super) fn lost(&self) -> Vec<String> {
        let lost = self.served.values().filter(|vm| vm.is_lost());
        lost.map(|vm| vm.name().to_owned()).collect()
    }

    /// One entry per VM.
    pub(super) fn counters(
        &self,
        sessions: &Sessions,
        grown: impl Fn(&str) -> (usize, u64),
    ) -> Vec<Counted> {
        let session = |vm: &Vm| vm.channel.and_then(|token| sessions.get(token));
        let served = self.served.values();
        let is_locked_down =
            |vm: &Vm| vm.kind() == "qemu" && self.locked_down.is_noted(vm.name(), vm.owner());
        let state = |vm: &Vm| state_of(vm, session(vm), is_locked_down(vm));
        let served = served.map(|vm| counted(vm, session(vm), state(vm), grown(vm.name())));
        let broken = self.broken.iter().map(|vm| Counted {
            kind: "vm".into(),
            name: vm.name.clone(),
            labels: vec![
                ("kind".into(), "-".into()),
                ("state".into(), "broken".into()),
            ],
            values: vec![("pool_bytes".into(), 0), ("pool_free".into(), 0)],
        });
        let mut all: Vec<Counted> = served.chain(broken).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

fn state_of(vm: &Vm, session: Option<&Session>, is_locked_down: bool) -> &'static str {
    match session {
        _ if vm.held().is_some() => "held",
        _ if is_locked_down => "locked-down",
        Some(session) if session.greeted => "ready",
        Some(_) => "connected",
        None => "waiting",
    }
}

fn counted(
    vm: &Vm,
    session: Option<&Session>,
    state: &str,
    (devices, grown): (usize, u64),
) -> Counted {
    let skipped = session.map_or(0, |session| session.framer.skipped());
    let mut values = vec![
        ("pool_bytes".into(), vm.pool_bytes()),
        ("pool_free".into(), vm.places.free()),
        ("channel_skipped_bytes".into(), skipped),
        ("grown_devices".into(), devices as u64),
        ("grown_bytes".into(), grown),
    ];
    if let Some(server) = &vm.doorbell {
        let (raised, from_guest) = server.counts();
        values.extend([
            ("doorbell_vectors_heard".into(), u64::from(vm.heard)),
            ("doorbell_to_guest".into(), raised),
            ("doorbell_from_guest".into(), from_guest),
        ]);
    }
    let mut labels = vec![
        ("kind".into(), vm.kind().into()),
        ("state".into(), state.into()),
    ];
    if let Some(read) = vm.held() {
        let read: Vec<&str> = read.iter().map(String::as_str).collect();
        labels.push(("read".into(), read.join(" ")));
    }
    Counted {
        kind: "vm".into(),
        name: vm.name().to_owned(),
        labels,
        values,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_that_a_kernel_is_locked_down_is_its_machines_until_it_says_otherwise() {
        let mut words = LockedDown::default();
        assert!(words.note("vm", 7, true));
        assert!(!words.note("vm", 7, true), "told once");
        assert!(words.is_noted("vm", 7));
        // Another machine by that name, and another name.
        assert!(!words.is_noted("vm", 8) && !words.is_noted("other", 7));
        assert!(words.note("vm", 8, true));
        assert!(!words.note("vm", 8, false));
        assert!(!words.is_noted("vm", 8));
        for name in 0..3 * MAX_VMS {
            words.note(&name.to_string(), 1, true);
        }
        assert!(words.0.len() <= MAX_VMS);
    }
}
