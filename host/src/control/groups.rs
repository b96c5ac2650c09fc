//! Groups of the host: whom an attach admits to them, and their files.

use vnplug_ring::control::{HOST_PREFIX, Open, VmKind, VmSpec, code};

use super::Control;
use crate::hub::policy::{Sight, Viewer};
use crate::hub::{NewHostGroup, Owner, Refusal};
use crate::vm::arenas::{self, ArenaFile, GroupRecord};
use crate::vm::{Plan, Vm};

impl Control {
    /// The groups that an attach asks for, as they are or would be, and whether each is to be made.
    ///
    /// # Errors
    /// [`Refusal`]: a name or a size is impossible, a group is another's, or the VM may not see its
    /// source as the group's members do.
    pub(super) fn wanted_groups(&self, spec: &VmSpec) -> Result<Vec<(GroupRecord, bool)>, Refusal> {
        arenas::check(&spec.groups)?;
        if spec.kind == VmKind::Uml && !spec.groups.is_empty() {
            let what = "a User-mode Linux maps one memory, its pool: its readers can have groups of \
                        their own there, and none of the host";
            return Err(Refusal::new(code::INVALID, what));
        }
        let viewer = Viewer::Vm(spec.name.clone());
        let groups = spec.groups.iter().map(|wanted| {
            if self.making_groups.contains(&wanted.name) {
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
            Ok((GroupRecord::new(wanted, size, &self.dirs), size.is_new))
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
        plan: &Plan,
        made: Vec<ArenaFile>,
    ) -> Result<(), Refusal> {
        let new: Vec<GroupRecord> = plan.new_groups().cloned().collect();
        for (group, file) in new.iter().zip(made) {
            let sight = self.sight_of_group(group, &spec.name, spec);
            self.hub
                .add_host_group(self.new_group(group, file, sight))?;
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

    /// Admits a VM of an earlier daemon to its groups. One that cannot be had is logged; of its name
    /// the VM's readers have a group in their own pool then.
    pub(super) fn admit_again(&mut self, vm: &Vm) {
        let viewer = Viewer::Vm(vm.name().to_owned());
        for group in vm.groups() {
            let sight = match self.policy.sight(&viewer, &group.source, &vm.grants()) {
                Sight::Through(sight) => sight,
                Sight::Nothing => continue,
            };
            if !self.hub.has_host_group(&group.name) {
                let added = group
                    .reopen()
                    .map_err(|error| Refusal::new(code::INTERNAL, error.to_string()))
                    .and_then(|file| {
                        let new = self.new_group(group, file, sight.clone());
                        self.hub.add_host_group(new)
                    });
                if let Err(refusal) = added {
                    let name = &group.name;
                    log::error!(
                        target: "vm",
                        "group {name:?}: {}; detach its VMs and attach them again", refusal.text
                    );
                    continue;
                }
            }
            self.hub.admit(&group.name, vm.name(), &sight);
        }
    }

    /// VMs of an earlier daemon that may not see the source of a group whose memory they still have
    /// keep the others from it.
    pub(super) fn shut_out_again(&mut self) {
        for vm in self.vms.values() {
            let viewer = Viewer::Vm(vm.name().to_owned());
            for group in vm.groups() {
                let sight = self.policy.sight(&viewer, &group.source, &vm.grants());
                if sight == Sight::Nothing {
                    self.hub.shut_out(&group.name, vm.name());
                }
            }
        }
    }

    /// Takes a VM out of its groups; the files of those that end go.
    pub(super) fn expel(&mut self, vm: &str) {
        arenas::remove_files(self.hub.expel(vm));
    }

    /// Deletes the files of a detached VM's groups that no daemon could make again: nobody else does.
    pub(super) fn remove_orphans(&self, groups: &[GroupRecord]) {
        let others = |group: &GroupRecord| {
            let mut vms = self.vms.values().flat_map(Vm::groups);
            self.hub.has_host_group(&group.name)
                || self.making_groups.contains(&group.name)
                || vms.any(|other| other.path == group.path)
        };
        let orphans = groups.iter().filter(|group| !others(group));
        arenas::remove_files(orphans.map(|group| &group.path));
    }

    /// The obligatory filter of a port: in a group of the host everybody has the group's, operators
    /// too, for the others read what they ask for.
    pub(super) fn guard_in_group(&self, viewer: &Viewer, open: &Open, own: String) -> String {
        let owner = match viewer {
            Viewer::User(uid) => Owner::User(*uid),
            Viewer::Vm(name) => Owner::Vm(name.clone()),
        };
        self.hub.host_sight(open, &owner).map_or(own, str::to_owned)
    }

    fn sight_of_group(&self, group: &GroupRecord, vm: &str, spec: &VmSpec) -> String {
        let viewer = Viewer::Vm(vm.to_owned());
        match self.policy.sight(&viewer, &group.source, &spec.allow) {
            Sight::Through(sight) => sight,
            // It was asked before, and `wanted_groups` refuses it again.
            Sight::Nothing => String::new(),
        }
    }

    fn new_group(&self, group: &GroupRecord, file: ArenaFile, sight: String) -> NewHostGroup {
        NewHostGroup {
            name: group.name.clone(),
            source: group.source.clone(),
            capacity: group.capacity,
            sight,
            path: group.path.clone(),
            memory: file.memory,
            reader: file.reader,
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
