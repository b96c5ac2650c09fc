//! The machine leaves: what must stay, what it needs there, and how its applications and its kernel let go.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use vnplug::{Client, Counted};
use vnplug_ring::control::VERSION;
use vnplug_ring::counters::label;
use vnplug_ring::pool::FIRST_RING;

use super::{Along, Migrate, Needs, TURN, Times};
use crate::failure::{Failure, PENDING};
use crate::list::value;
use crate::qemu::advice::pending;
use crate::qemu::incoming::source_of;
use crate::qemu::monitor::Monitor;
use crate::qemu::parts::{self, Part};
use crate::qemu::{QMP_LIMIT, blocks, grow, nic, pmem, target};
use crate::sys;

impl Migrate {
    /// What QEMU would say no to when the other one has its devices, which it cannot let go of.
    pub(super) fn refuse_what_cannot_go_along(
        &self,
        qemu: &mut dyn Monitor,
    ) -> Result<(), Failure> {
        let told = qemu.execute("query-migrate", json!({}))?;
        if let Some(reason) = told["blocked-reasons"][0].as_str() {
            return Err(Failure::about(&self.vm.name, format!("QEMU: {reason}")));
        }
        let switches = qemu.execute("query-migrate-capabilities", json!({}))?;
        let is_on = |it: &Value| it["capability"] == "postcopy-ram" && it["state"] == true;
        if switches.as_array().is_some_and(|all| all.iter().any(is_on)) {
            // Pages of the pool would come when it is in use.
            let text = "does not move with its memory by postcopy: switch postcopy-ram off";
            return Err(Failure::about(&self.vm.name, text));
        }
        Ok(())
    }

    /// What would be left behind, or has no counterpart there.
    pub(super) fn refuse_what_stays(&self, qemu: &mut dyn Monitor) -> Result<(), Failure> {
        let name = &self.vm.name;
        let nics = nic::plugged(qemu, name)?;
        let present = parts::present(qemu)?;
        let text = if !nics.is_empty() {
            format!(
                "has interfaces on {}: `vnplug detach qemu --nic` first, and attach them there",
                nics.join(", ")
            )
        } else if !grow::numbers(name, &present).is_empty() {
            "has memory that `attach --grow` plugged, which does not move: detach it first"
                .to_owned()
        } else if let [first, ..] = pmem::devices(name, &present).as_slice() {
            format!(
                "has the virtio-pmem device {first}, which QEMU can neither unplug nor move with what is in it: \
                 end the machine and start it there; nothing was changed"
            )
        } else if parts::all_parts(name)
            .iter()
            .any(|part| part.is_bell() && present.contains(&part.id))
        {
            "has a doorbell, which does not move: detach it, and attach it without --doorbell"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Failure::about(name, text))
    }

    /// What the VM must find there: the sources that its applications read, and room for their rings.
    pub(super) fn needs(&self, client: &mut Client) -> Result<Needs, Failure> {
        let own = format!("vm {}", self.vm.name);
        let counters = client.stats()?;
        let is_own = |it: &&Counted| it.kind == "port" && label(it, "owner") == own;
        let read = counters.iter().filter(is_own);
        let mut sources: BTreeSet<String> = read
            .map(|it| source_of(label(it, "device")).to_owned())
            .collect();
        let vm = counters
            .iter()
            .find(|it| it.kind == "vm" && it.name == self.vm.name);
        // Of one that is held already there are no ports.
        let held = vm
            .into_iter()
            .flat_map(|it| label(it, "read").split_whitespace());
        sources.extend(held.map(str::to_owned));
        Ok(Needs {
            sources,
            pool: vm.map_or(0, |it| value(it, "pool_bytes")),
            domain: None,
        })
    }

    /// What is run where the machine goes to.
    pub(super) fn command(
        &self,
        needs: &Needs,
        along: Option<&Along>,
        has_come: bool,
    ) -> Result<std::process::Command, Failure> {
        let mut words: Vec<String> = Vec::new();
        let mut option = |name: &str, value: &str| {
            words.extend([name.to_owned(), value.to_owned()]);
        };
        if let Some(socket) = &self.target_socket {
            option("--socket", &socket.to_string_lossy());
        }
        option("attach", "qemu");
        option("--name", &self.vm.name);
        match &self.libvirt {
            Some(domain) => {
                option("--libvirt", needs.domain.as_ref().unwrap_or(domain));
                option("--connect", &self.target_connect);
            }
            None => {
                let qmp = self.target_qmp.as_deref();
                option("--qmp", &qmp.unwrap_or(Path::new("")).to_string_lossy());
            }
        }
        let pool = match self.vm.pool {
            // What fits here fits there.
            0 => needs.pool,
            asked => asked,
        };
        let pool = along.map_or(pool, |along| along.pool);
        if pool > 0 {
            option("--pool", &pool.to_string());
        }
        for place in along.iter().flat_map(|along| &along.places) {
            option("--place", &place.to_string());
        }
        for grant in &self.vm.allow {
            match grant.filter.as_str() {
                "" => option("--allow", &grant.source),
                filter => option("--allow", &format!("{}:{filter}", grant.source)),
            }
        }
        self.groups.iter().for_each(|it| option("--group", it));
        self.buses.iter().for_each(|it| option("--bus", it));
        needs.sources.iter().for_each(|it| option("--needs", it));
        option("--speaks", &VERSION.to_string());
        if let Some(user) = &self.qemu_user {
            option("--qemu-user", user);
        }
        words.push("--incoming".to_owned());
        if along.is_some() {
            words.push("--movable".to_owned());
        }
        if has_come {
            words.push("--come".to_owned());
        }
        target::command(self.host().as_deref(), &words)
    }

    /// Has the applications and then the guest's kernel let go, and takes everything out of this QEMU that does not
    /// go along.
    pub(super) fn let_go(
        &self,
        qemu: &mut dyn Monitor,
        client: &mut Client,
        owner: u64,
        along: Option<&Along>,
        times: &mut Times,
    ) -> Result<(), Failure> {
        let name = &self.vm.name;
        let begun = Instant::now();
        client.hold_vm(name, owner, true)?;
        let mapped = self.await_drained(client)?;
        if mapped > 0 && !self.force {
            let text = format!(
                "applications in the guest still map {} KiB of its memory after {} s (one that does not read what \
                 waits for it, or a back-end's): end them, or --force{}",
                mapped >> 10,
                self.timeout.as_secs_f32(),
                match along {
                    Some(_) => "",
                    None => ", by which the kernel kills them",
                }
            );
            return Err(Failure::about(name, text));
        }
        times.drained = begun.elapsed();
        let begun = Instant::now();
        let present = parts::present(qemu)?;
        let here: Vec<Part> = parts::all_parts(name)
            .into_iter()
            .filter(|part| present.contains(&part.id))
            .filter(|part| along.is_none() || !part.goes_along())
            .collect();
        let left = parts::remove(qemu, &here, self.timeout)?;
        if !left.is_empty() {
            return Err(Failure::with_code(
                PENDING,
                format!("{name}: {}", pending(&left)),
            ));
        }
        // A name that is still there would be part of the stream, and the other QEMU does not know it.
        let stale = blocks::wait_until_gone(qemu, &here.iter().collect::<Vec<_>>(), QMP_LIMIT)?;
        if !stale.is_empty() {
            let text = format!("QEMU does not let go of {}", stale.join(", "));
            return Err(Failure::about(name, text));
        }
        times.unplugged = begun.elapsed();
        Ok(())
    }

    /// Waits until no application maps memory; how much they do at the end.
    fn await_drained(&self, client: &mut Client) -> Result<u64, Failure> {
        let deadline = Instant::now() + self.timeout;
        loop {
            let counters = client.stats()?;
            let vm = counters
                .iter()
                .find(|it| it.kind == "vm" && it.name == self.vm.name);
            let mapped = vm.map_or(0, |vm| {
                let all = value(vm, "pool_bytes").saturating_sub(FIRST_RING);
                all.saturating_sub(value(vm, "pool_free"))
            });
            if mapped == 0 || Instant::now() >= deadline {
                return Ok(mapped);
            }
            if sys::stop().is_some() {
                return Err(Failure::about(&self.vm.name, "stopped by a signal"));
            }
            std::thread::sleep(TURN);
        }
    }
}
