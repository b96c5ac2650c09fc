//! Groups of the host: whom an attach admits to them, and their files.

use std::path::Path;

use vnplug_ring::control::{HOST_PREFIX, Open, VmKind, VmSpec, code};

use super::Control;
use crate::hub::policy::Sight;
use crate::hub::{Home, NewHostGroup, Peer, Refusal};
use crate::vm::arenas::{self, ArenaFile, GroupRecord};
use crate::vm::{Vm, VmPlan};

impl Control {
    /// The groups that an attach asks for, as they are or would be, and whether each is to be made.
    ///
    /// # Errors
    /// [`Refusal`]: a name or a size is impossible, a group is another's, or the VM may not see its
    /// source as the group's members do.
    pub(super) fn wanted_groups(&self, spec: &VmSpec) -> Result<Vec<(GroupRecord, bool)>, Refusal> {
        arenas::check(&spec.groups)?;
        if spec.kind == VmKind::Uml && !spec.groups.is_empty() {
            let what = "a User-mode Linux maps one memory, its pool, and can write all of it: its readers can \
                        have groups of their own there, and none of the host";
            return Err(Refusal::new(code::INVALID, what));
        }
        let viewer = Peer::Vm(spec.name.clone());
        let groups = spec.groups.iter().map(|wanted| {
            if self.vms.is_making_group(&wanted.name) {
                let name = &wanted.name;
                let what = format!("group {name:?} is being made by another attach; try again");
                return Err(Refusal::new(code::EXISTS, what));
            }
            let source = wanted.source.as_str();
            let sight = || match self.policy.sight(&viewer, source, &spec.allow) {
                Sight::Through(sight) => Ok(sight),
                Sight::Nothing => {
                    let (vm, name) = (&spec.name, &wanted.name);
                    let what = format!(
                        "VM {vm:?} may not see {source:?}, the source of group {name:?}: add \
                         --allow {source}"
                    );
                    Err(Refusal::new(code::DENIED, what))
                }
            };
            let size = self.hub.size_host_group(wanted, sight)?;
            let is_new = size.is_new;
            Ok((GroupRecord::new(wanted, size, &self.vms.dirs), is_new))
        });
        groups.collect()
    }

    /// Admits a VM to its groups, of which those in `made` were made for it.
    ///
    /// # Errors
    /// [`Refusal`]: what was planned is not so any more. The VM may be in some of them then.
    pub(super) fn admit_new(
        &mut self,
        spec: &VmSpec,
        plan: &VmPlan,
        made: Vec<Option<ArenaFile>>,
    ) -> Result<(), Refusal> {
        let new: Vec<GroupRecord> = plan.new_groups().cloned().collect();
        for (group, file) in new.iter().zip(made) {
            let home = match file {
                Some(file) => group.home(file),
                None => self.packets(group)?,
            };
            let sight = self.sight_of_group(group, &spec.name, spec);
            let (name, source) = (&group.name, &group.source);
            match home {
                Home::Packets(_) => log::info!(
                    target: "vm",
                    "group {name:?} reads the packet memory of {source:?}, where frames are received"
                ),
                _ => self.say_why_copied(group, &sight),
            }
            self.hub
                .add_host_group(self.new_group(group, home, sight))?;
        }
        // Another VM, the last of a group, may have been detached meanwhile.
        let now = self.wanted_groups(spec)?;
        let planned = plan.groups().iter();
        if now.iter().any(|(_, is_new)| *is_new) || !now.iter().map(|it| &it.0).eq(planned) {
            let what = "a group ended while the VM's memory was made: attach again";
            return Err(Refusal::new(code::UNAVAILABLE, what));
        }
        for group in plan.groups() {
            let sight = self.sight_of_group(group, &spec.name, spec);
            self.hub.admit(&group.name, &spec.name, &sight);
        }
        Ok(())
    }

    /// Admits a VM of an earlier daemon to its groups. One that cannot be had is barred until its VMs
    /// are detached.
    pub(super) fn admit_again(&mut self, vm: &Vm) {
        let viewer = Peer::Vm(vm.name().to_owned());
        for group in vm.groups() {
            let sight = match self.policy.sight(&viewer, &group.source, &vm.grants()) {
                Sight::Through(sight) => sight,
                // When those that see it have made the group: it is theirs again without this VM.
                Sight::Nothing => continue,
            };
            if let Err(refusal) = self.find_again(group, &sight) {
                self.bar(group, vm.name(), &refusal.text);
                continue;
            }
            self.hub.admit(&group.name, vm.name(), &sight);
        }
    }

    /// Makes a group of an earlier daemon again, if it is not there yet.
    fn find_again(&mut self, group: &GroupRecord, sight: &str) -> Result<(), Refusal> {
        // Also where the group is there: another of its VMs may have another memory.
        let packets = match group.is_packets() {
            true => Some(self.packets(group)?),
            false => None,
        };
        if self.hub.has_host_group(&group.name) {
            return Ok(());
        }
        let new = match packets {
            // Its members see everything, or it is barred.
            Some(home) => self.new_group(group, home, String::new()),
            None => {
                let file = group.reopen();
                let file = file.map_err(|it| Refusal::new(code::INTERNAL, it.to_string()))?;
                self.new_group(group, group.home(file), sight.to_owned())
            }
        };
        self.hub.add_host_group(new)
    }

    /// The packet memory that a group was made on.
    fn packets(&self, group: &GroupRecord) -> Result<Home, Refusal> {
        let mut files = self.hub.packet_files();
        let now = files.find(|(source, _)| *source == group.source);
        match now {
            Some((_, file))
                if (&file.path, file.inode, &file.layout)
                    == (&group.path, group.inode, &group.layout) =>
            {
                Ok(Home::Packets(file.clone()))
            }
            now => {
                let source = &group.source;
                let what = match now {
                    Some((_, file)) => format!(
                        "the packet memory of {source:?} is another file now ({})",
                        file.path.display()
                    ),
                    None => format!("{source:?} has no packet memory that VMs can map now"),
                };
                Err(Refusal::new(code::UNAVAILABLE, what))
            }
        }
    }

    /// A VM has the memory of a group that cannot be had: nobody can be in that group meanwhile.
    fn bar(&mut self, group: &GroupRecord, vm: &str, why: &str) {
        let name = &group.name;
        let what = format!("group {name:?}, whose memory VM {vm:?} has: {why}; detach VM {vm:?}");
        if !self.hub.has_host_group(name) {
            let lost = self.new_group(group, Home::Lost(what.clone()), String::new());
            if let Err(refusal) = self.hub.add_host_group(lost) {
                log::error!(target: "vm", "{what} ({})", refusal.text);
                return;
            }
        }
        self.hub.bar_for(name, vm, what);
    }

    /// VMs that cannot be served may run, with the memory of groups: what they may see is not known.
    pub(super) fn bar_broken(&mut self) {
        for vm in std::mem::take(&mut self.vms.broken) {
            for group in &vm.groups {
                let why = format!("it cannot be served ({})", vm.why);
                self.bar(group, &vm.name, &why);
            }
            self.vms.broken.push(vm);
        }
    }

    /// Forgets a VM of an earlier daemon that could not be served; false if there is none.
    pub(super) fn forget_broken(&mut self, name: &str) -> bool {
        let Some(at) = self.vms.broken.iter().position(|vm| vm.name == name) else {
            return false;
        };
        let vm = self.vms.broken.swap_remove(at);
        vm.remove_files(&self.vms.dirs.state);
        self.expel(name);
        self.remove_orphans(&vm.groups);
        true
    }

    /// Deletes files of packet memory that no VM has, of sources that are no more.
    pub(super) fn remove_packets(&self) {
        let is_ours = |path: &Path| self.hub.packet_files().any(|(_, file)| file.path == path);
        arenas::remove_packets(&self.vms.dirs, |path| {
            is_ours(path) || self.vms.has_plugged(path)
        });
        self.withdraw_packets();
    }

    /// A source lends its packet memory, and this group has copies.
    fn say_why_copied(&self, group: &GroupRecord, sight: &str) {
        let (name, source) = (&group.name, &group.source);
        if let Some(lends_to_vms) = self.hub.lends(source) {
            let why = match lends_to_vms {
                false => "VMs cannot map the packet memory of its source (arena=vm)",
                true if !sight.is_empty() => "its members do not see everything",
                true => "a size was given",
            };
            log::info!(target: "vm", "group {name:?} of {source:?} has copies: {why}");
        }
    }

    /// VMs of an earlier daemon that may not see the source of a group whose memory they still have
    /// keep the others from it.
    pub(super) fn shut_out_again(&mut self) {
        let mut out = Vec::new();
        for vm in self.vms.served.values() {
            let viewer = Peer::Vm(vm.name().to_owned());
            for group in vm.groups() {
                let sight = self.policy.sight(&viewer, &group.source, &vm.grants());
                if sight == Sight::Nothing {
                    out.push((group.clone(), vm.name().to_owned()));
                }
            }
        }
        for (group, vm) in out {
            let or = match group.is_packets() {
                // It is another file now.
                true => "",
                false => " (or grant it what the others see and restart the daemon)",
            };
            let why = format!("it may not see {:?} any more{or}", group.source);
            self.bar(&group, &vm, &why);
        }
    }

    /// Takes a VM out of its groups; the files of those that end go.
    pub(super) fn expel(&mut self, vm: &str) {
        arenas::remove_files(self.hub.expel(vm));
    }

    /// Deletes the files of a detached VM's groups that no daemon could make again: nobody else does.
    pub(super) fn remove_orphans(&self, groups: &[GroupRecord]) {
        let others = |group: &GroupRecord| {
            let mut packets = self.hub.packet_files();
            (!group.is_packets() && self.hub.has_host_group(&group.name))
                || packets.any(|(_, file)| file.path == group.path)
                || self.vms.is_making_group(&group.name)
                || self.vms.has_plugged(&group.path)
        };
        let orphans = groups.iter().filter(|group| !others(group));
        arenas::remove_files(orphans.map(|group| &group.path));
        self.withdraw_packets();
    }

    /// Who had packet memory through a VM, which is no more, has it no more.
    fn withdraw_packets(&self) {
        let files = self.hub.packet_files().map(|(_, file)| &*file.path);
        let unplugged = files.filter(|path| !self.vms.has_plugged(path));
        unplugged.for_each(arenas::withdraw);
    }

    /// The obligatory filter of a port: in a group of the host everybody has the group's, operators
    /// too, for the others read what they ask for.
    pub(super) fn guard_in_group(
        &self,
        viewer: &Peer,
        open: &Open,
        own: String,
    ) -> Result<String, Refusal> {
        match self.hub.host_sight(open, viewer) {
            None => Ok(own),
            // What the members see is fixed, and the viewer's grants may have changed since it was admitted.
            Some(sight) if sight != own && !self.policy.is_operator(viewer) => {
                let what = format!(
                    "the members of group {:?} see what its VM may not see any more, or not all of it",
                    open.group
                );
                Err(Refusal::new(code::DENIED, what))
            }
            Some(sight) => Ok(sight.to_owned()),
        }
    }

    fn sight_of_group(&self, group: &GroupRecord, vm: &str, spec: &VmSpec) -> String {
        let viewer = Peer::Vm(vm.to_owned());
        match self.policy.sight(&viewer, &group.source, &spec.allow) {
            Sight::Through(sight) => sight,
            // It was asked before, and `wanted_groups` refuses it again.
            Sight::Nothing => String::new(),
        }
    }

    fn new_group(&self, group: &GroupRecord, home: Home, sight: String) -> NewHostGroup {
        NewHostGroup {
            name: group.name.clone(),
            source: group.source.clone(),
            capacity: group.capacity,
            sight,
            home,
            operators: self.policy.operators().to_vec(),
        }
    }
}

/// The source's name alone, as records have it.
pub(super) fn name_sources(spec: &mut VmSpec) {
    for group in &mut spec.groups {
        if let Some(name) = group.source.strip_prefix(HOST_PREFIX) {
            group.source = name.to_owned();
        }
    }
}
