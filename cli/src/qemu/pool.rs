//! The memory pool and the control channel of a VM, and the memory of its groups, go into a QEMU.

use serde_json::json;
use vnplug::Client;
use vnplug_ring::control::{VmKind, VmReady, VmSpec};
use vnplug_ring::pmem::FRONT;

use super::advice::{advice, pending};
use super::attach::Attach;
use super::migrate::{self, Standing};
use super::monitor::{Monitor, MonitorError, has_kvm};
use super::parts::{self, Kind, Part};
use super::pmem::{self, Memory};
use super::slots::{self, DeviceAddress};
use super::{QMP_LIMIT, access, blocks};
use crate::failure::Failure;
use crate::out;

impl Attach {
    /// Attaches; the connection by which that was done.
    pub(super) fn attach_pool(
        &self,
        monitor: &mut dyn Monitor,
        buses: &[String],
        mut client: Client,
    ) -> Result<Client, Failure> {
        let name = &self.vm.name;
        if !self.incoming && migrate::standing(monitor)?.0 == Standing::Moving {
            // Its ports are closed, and the daemon would open them.
            let text = "is on its way to another QEMU: run `vnplug migrate` again, or wait";
            return Err(Failure::about(name, text));
        }
        if !self.incoming && monitor.execute("query-status", json!({}))?["status"] == "inmigrate" {
            // What is plugged now the machine that comes does not know.
            let text = "this QEMU waits for a machine that comes from another one: attach it when it is here";
            return Err(Failure::about(name, text));
        }
        let mut present = parts::present(monitor)?;
        if let Some(other) = pmem::other_kind(name, self.memory, &present) {
            return Err(Failure::about(name, other));
        }
        let mut parts = self.parts(&present);
        if !is_prefix(&parts, &present) {
            out::note(&format!("{name}: finishing an earlier detach first"));
            (present, parts) = self.clear(monitor)?;
        }
        let is_plugged = present.contains(&format!("vnplug-{name}-shm"));
        if self.movable && is_plugged && !parts::is_movable(monitor, name, &present)? {
            let text = "is attached without --movable: run `vnplug detach qemu` first";
            return Err(Failure::about(name, text));
        }
        let (mut missing, mut places) = self.missing(monitor, buses, &parts, &present)?;

        let owner = access::identity(monitor)?;
        let daemon = client.server_user()?;
        let ready = client.attach_vm(self.spec(owner))?;
        if ready.arenas.len() != self.groups.len() {
            let text = "the daemon is too old for --group: update it";
            return Err(Failure::about(name, text));
        }
        if let Some(most) = self.grow {
            // Before the guest can see its pool: where a port lies is settled when it is opened.
            client.offer_growth(name, most, self.apart)?;
        }
        if self.has_lost_memory(monitor, &parts, &present, &ready)? {
            out::note(&format!(
                "{name}: the memory that is plugged was given up: it is unplugged, and plugged anew"
            ));
            (present, parts) = self.clear(monitor)?;
            (missing, places) = self.missing(monitor, buses, &parts, &present)?;
        }
        if missing.is_empty() {
            let text = match self.incoming {
                true => self.summary(&ready, false),
                false => format!("{name}: is attached already, nothing to do"),
            };
            out::line(&text)?;
            return Ok(client);
        }
        let all: Vec<&Part> = missing.iter().collect();
        if let Err(failure) = self.plug(monitor, &all, (&ready, daemon), places) {
            if missing.len() == parts.len() {
                // Nothing of this VM was here before, so the daemon need not know it either.
                client.detach_own_vm(name, owner).unwrap_or_else(|error| {
                    out::warn(&format!("{name}: the daemon did not forget it: {error}"));
                });
            }
            return Err(failure);
        }
        out::line(&self.summary(&ready, missing.len() < parts.len()))?;
        let is_own = |id: &String| parts.iter().any(|part| part.id == *id);
        let mut earlier = pmem::devices(name, &present);
        earlier.retain(|id| !is_own(id));
        if !earlier.is_empty() {
            out::note(&format!(
                "{name}: of an earlier attach {}",
                pmem::stay(&earlier)
            ));
        }
        // NB: hw/misc/ivshmem.c closes the vectors' eventfds and leaves its handlers on their
        // numbers; with KVM's irqfd it has none. Two crashes seen after detach and attach.
        if self.doorbell > 0 && !has_kvm(monitor) {
            out::note(&format!(
                "{name}: this QEMU runs without KVM and may crash after the doorbell is unplugged"
            ));
        }
        Ok(client)
    }

    /// Takes everything of this VM out of QEMU that can go; what is there then, and the pieces in a QEMU that has it.
    pub(super) fn clear(
        &self,
        monitor: &mut dyn Monitor,
    ) -> Result<(Vec<String>, Vec<Part>), Failure> {
        let name = &self.vm.name;
        let left = parts::remove(monitor, &parts::all_parts(name), QMP_LIMIT)?;
        if !left.is_empty() {
            return Err(Failure::about(name, pending(&left)));
        }
        let present = parts::present(monitor)?;
        let parts = self.parts(&present);
        Ok((present, parts))
    }

    /// The pieces that are missing, and where devices among them may go.
    fn missing(
        &self,
        monitor: &mut dyn Monitor,
        buses: &[String],
        parts: &[Part],
        present: &[String],
    ) -> Result<(Vec<Part>, Vec<DeviceAddress>), Failure> {
        let name = &self.vm.name;
        let missing: Vec<&Part> = parts.iter().filter(|p| !present.contains(&p.id)).collect();
        let pci = missing.iter().filter(|part| part.kind == Kind::Pci).count();
        let places =
            slots::choose(monitor, buses, pci)?.map_err(|no_room| Failure::about(name, no_room))?;
        let stale = blocks::wait_until_gone(monitor, &missing, QMP_LIMIT)?;
        if !stale.is_empty() {
            let text = format!(
                "QEMU has memory by these names: {}; it is of devices that were unplugged a moment ago, or \
                 somebody else's, and QEMU may abort when the names come again. Nothing was changed; run \
                 the command again",
                stale.join(", ")
            );
            return Err(Failure::about(name, text));
        }
        Ok((missing.into_iter().cloned().collect(), places))
    }

    /// What the daemon is told of this machine.
    pub(super) fn spec(&self, owner: u64) -> VmSpec {
        VmSpec {
            name: self.vm.name.clone(),
            kind: match self.memory {
                Memory::Ivshmem => VmKind::Qemu,
                Memory::Pmem => VmKind::QemuPmem,
            },
            pool_bytes: self.vm.pool,
            vectors: self.doorbell,
            allow: self.vm.allow.clone(),
            owner,
            groups: self.groups.clone(),
            stays_for: None,
        }
    }

    /// Adds the missing parts, or none of them; `daemon` is the user who named what is plugged.
    pub(super) fn plug(
        &self,
        monitor: &mut dyn Monitor,
        missing: &[&Part],
        (ready, daemon): (&VmReady, u32),
        places: Vec<DeviceAddress>,
    ) -> Result<(), Failure> {
        let name = &self.vm.name;
        let owner = match self.qemu_user {
            Some(owner) => Some(owner),
            None => monitor.qemu_user()?,
        };
        if let Some(owner) = owner {
            access::hand_over(ready, daemon, owner)?;
        }
        let mut places = places.into_iter();
        let mut done: Vec<Part> = Vec::new();
        for part in missing {
            let place = match part.kind {
                Kind::Pci => places.next().unwrap_or_default(),
                _ => DeviceAddress::default(),
            };
            let added = part.add(monitor, name, ready, self.doorbell, &place);
            // Without an answer it may be there; removing what is not there is harmless.
            if !matches!(added, Err(MonitorError::Refused { .. })) {
                done.push((*part).clone());
            }
            if let Err(error) = added {
                let advice = advice(&error);
                let stays = done.iter().find(|part| part.is_pmem()).cloned();
                if stays.is_some() {
                    done.retain(|part| !part.is_pmem() && part.kind != Kind::Object);
                }
                let rolled_back = match parts::remove(monitor, &done, QMP_LIMIT) {
                    Ok(left) if left.is_empty() => match stays {
                        Some(device) => pmem::stay(&[device.id]),
                        None => "nothing was changed".to_owned(),
                    },
                    Ok(left) => pending(&left),
                    Err(error) => format!("taking back what was done failed too: {error}"),
                };
                let part = &part.id;
                let text = format!("{name}: {part}: {error}{advice}; {rolled_back}");
                return Err(Failure::new(text));
            }
        }
        Ok(())
    }

    fn summary(&self, ready: &VmReady, repaired: bool) -> String {
        let how = if repaired {
            "attached (completed an interrupted attach)"
        } else {
            "attached"
        };
        let doorbell = match self.doorbell {
            0 => String::new(),
            vectors => format!(", doorbell with {vectors} vectors"),
        };
        let arenas = ready.arenas.iter().zip(&self.groups);
        let groups: String = arenas
            .map(|((path, len), group)| {
                let what = match path.ends_with(".umem") {
                    true => format!(", packet memory of {}", group.source),
                    false => String::new(),
                };
                format!(", group {} ({} MiB{what})", group.name, len >> 20)
            })
            .collect();
        let (front, pmem) = match self.memory {
            Memory::Ivshmem => (0, ""),
            Memory::Pmem => (
                FRONT,
                ", as virtio-pmem, which stays until the machine ends",
            ),
        };
        format!(
            "{}: {how}: pool of {} MiB ({}){pmem}{doorbell}{groups}; run `vnplug agent` in the guest",
            self.vm.name,
            ready.pool_len.saturating_sub(front) >> 20,
            ready.pool_path,
        )
    }
}

/// True if the parts that are present are the first ones.
fn is_prefix(parts: &[Part], present: &[String]) -> bool {
    let mut here = parts.iter().map(|part| present.contains(&part.id));
    here.by_ref().find(|here| !here);
    !here.any(|here| here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_attach_is_told_from_an_unanswered_detach() {
        let all = parts::parts("a", false, 1);
        let ids = |suffixes: &[&str]| -> Vec<String> {
            suffixes.iter().map(|s| format!("vnplug-a-{s}")).collect()
        };
        for attach in [
            &[][..],
            &["mem"],
            &["mem", "chr", "shm"],
            &["mem", "chr", "shm", "ser", "port"],
            &["mem", "chr", "shm", "ser", "port", "mem0"],
        ] {
            assert!(is_prefix(&all, &ids(attach)), "{attach:?}");
        }
        for detach in [
            &["mem", "shm", "ser"][..],
            &["mem", "mem0", "shm0"],
            &["mem", "shm"],
            &["chr"],
        ] {
            assert!(!is_prefix(&all, &ids(detach)), "{detach:?}");
        }
    }
}
