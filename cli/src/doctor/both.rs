//! Checks that a host and a guest have in common.

use std::ops::RangeInclusive;

use super::check::{Check, Finding};
use super::machine::{self, Machine};

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check::new("clock", clock),
        Check::new("tun", tun),
        Check::new("cpus", cpus),
        Check::new("apparmor", apparmor),
    ]
}

/// Who takes a time stamp reads the clock: a device costs a microsecond, a register 20 ns.
fn clock(machine: &Machine) -> Finding {
    let dir = "/sys/devices/system/clocksource/clocksource0";
    let Ok(now) = machine.read(&format!("{dir}/current_clocksource")) else {
        return Finding::skipped("the system names no clock source");
    };
    match now.as_str() {
        "hpet" | "acpi_pm" | "refined-jiffies" | "jiffies" => Finding::warn(
            format!("the clock source is {now}: every time stamp asks a device"),
            format!(
                "see why in `dmesg | grep -i clocksource`; if the TSC is sound: echo tsc >{dir}/current_clocksource"
            ),
        ),
        _ => Finding::ok(format!("clock source {now}")),
    }
}

/// `vnplug tap` and `vnplug nic`.
fn tun(machine: &Machine) -> Finding {
    match machine.has("/dev/net/tun") {
        true => Finding::ok("/dev/net/tun is there, for `vnplug tap` and `vnplug nic`"),
        false => Finding::warn(
            "there is no /dev/net/tun: no `vnplug tap`, no `vnplug nic`",
            "modprobe tun",
        )
        .fixed_by(|_| machine::run("modprobe", &["tun"])),
    }
}

/// tcpdump's profile. It has to take "disconnected" paths: the ring's memory comes from a service with mounts of its own.
const TCPDUMP: &str = "usr.bin.tcpdump";

/// Programs that distributions confine: their profiles know no file of ours until somebody appends them.
fn apparmor(machine: &Machine) -> Finding {
    let enabled = machine.read("/sys/module/apparmor/parameters/enabled");
    if enabled.ok().as_deref() != Some("Y") {
        return Finding::ok("no AppArmor");
    }
    // tcpdump's package brings a profile all the same.
    let parsers = ["/sbin/apparmor_parser", "/usr/sbin/apparmor_parser"];
    if !parsers.iter().any(|it| machine.has(it)) {
        return Finding::ok("the package apparmor is not installed, so no profile is loaded");
    }
    let dir = "/etc/apparmor.d";
    let has_dropin = ["/usr/lib", "/usr/local/lib"]
        .iter()
        .any(|lib| machine.has(&format!("{lib}/vnplug/libpcap.so.0.8")));
    // The profile, its local part, who it confines.
    let parts = [
        (
            "abstractions/libvirt-qemu",
            "abstractions/libvirt-qemu",
            "QEMUs of libvirt's (`vnplug attach`)",
            true,
        ),
        (TCPDUMP, TCPDUMP, "tcpdump (the drop-in)", has_dropin),
    ];
    let lacks_lines = |local: &str| {
        let said = machine.read(&format!("{dir}/local/{local}"));
        let said = said.unwrap_or_default();
        let mut lines = said
            .lines()
            .filter(|line| !line.trim_start().starts_with('#'));
        !lines.any(|line| line.contains("vnplug"))
    };
    let lacks_flag = |profile: &str| {
        let text = machine.read(&format!("{dir}/{profile}"));
        let text = text.unwrap_or_default();
        let mut heads = text.lines().filter(|line| line.starts_with("profile "));
        profile == TCPDUMP && !heads.any(|line| line.contains("attach_disconnected"))
    };
    let lacks = |(profile, local, _, counts): &(&str, &str, &str, bool)| {
        *counts
            && machine.has(&format!("{dir}/{profile}"))
            && !machine.has(&format!("{dir}/disable/{profile}"))
            && (lacks_lines(local) || lacks_flag(profile))
    };
    let missing: Vec<_> = parts.iter().filter(|it| lacks(it)).collect();
    if missing.is_empty() {
        return Finding::ok("AppArmor confines nothing that reads here, or knows vNPlug's files");
    }
    let share = ["/usr/share", "/usr/local/share"]
        .into_iter()
        .find(|it| machine.has(&format!("{it}/vnplug/apparmor")))
        .unwrap_or("/usr/share");
    let cures = missing.iter().map(|(_, local, ..)| {
        let name = local.rsplit('/').next().unwrap_or(local);
        let append = format!("cat {share}/vnplug/apparmor/{name} >>{dir}/local/{local}");
        if name != TCPDUMP {
            return format!("{append}    (for machines that start then)");
        }
        let mut cure = Vec::new();
        if lacks_lines(local) {
            cure.push(append);
        }
        if lacks_flag(name) {
            // A profile that has other flags, as after `aa-complain`, keeps them; one that has this stays as it is.
            cure.push(format!(
                "sed -i '/^profile tcpdump/{{/attach_disconnected/b;s/flags=(/&attach_disconnected,/;t;s/ {{$/ \
                 flags=(attach_disconnected) {{/}}' {dir}/{name}"
            ));
        }
        cure.push(format!("apparmor_parser -r {dir}/{name}"));
        cure.join(" && ")
    });
    let whom: Vec<_> = missing.iter().map(|(_, _, whom, _)| *whom).collect();
    Finding::warn(
        format!(
            "AppArmor refuses vNPlug's files to {}",
            whom.join(" and to ")
        ),
        cures.collect::<Vec<_>>().join("; "),
    )
}

/// A queue's thread and its reader hand packets through a cache, if they share one.
fn cpus(machine: &Machine) -> Finding {
    let dir = "/sys/devices/system/cpu";
    let mut caches = Vec::new();
    for cpu in machine.names(dir) {
        let last = machine.names(&format!("{dir}/{cpu}/cache"));
        let last = last.into_iter().rfind(|it| it.starts_with("index"));
        let shared = last.and_then(|last| {
            machine
                .read(&format!("{dir}/{cpu}/cache/{last}/shared_cpu_list"))
                .ok()
        });
        caches.extend(shared.filter(|it| !caches.contains(it)));
    }
    let isolated = isolated(machine);
    match caches.len() {
        0 => Finding::skipped("the system does not say which CPUs share a cache"),
        1 => Finding::ok(format!("all CPUs share a cache{isolated}")),
        count => Finding::warn(
            format!(
                "{count} groups of CPUs share no cache: {}{isolated}",
                caches.join(" | ")
            ),
            "keep a source's threads and its readers in one group: option cpus= of the source, `taskset` for readers",
        ),
    }
}

/// CPUs on which the scheduler puts no thread by itself, and how many of the daemon's were put there. Whether they are for
/// others, as for the CPUs of guests, only who isolated them knows.
fn isolated(machine: &Machine) -> String {
    let list = machine.read("/sys/devices/system/cpu/isolated");
    let list = list.unwrap_or_default();
    if list.is_empty() {
        return String::new();
    }
    let Some(pid) = machine.process("vnplugd") else {
        return format!("; isolated: {list}");
    };
    let is_isolated = |cpu: &u32| spans(&list).any(|span| span.contains(cpu));
    // A thread that may run on one alone was put there.
    let pinned = machine.names(&format!("/proc/{pid}/task")).into_iter();
    let pinned = pinned.filter_map(|thread| {
        let status = machine.read(&format!("/proc/{pid}/task/{thread}/status"));
        let status = status.ok()?;
        let mut lines = status.lines();
        let allowed = lines.find_map(|it| it.strip_prefix("Cpus_allowed_list:"))?;
        allowed.trim().parse::<u32>().ok()
    });
    match pinned.filter(is_isolated).count() {
        0 => format!(
            "; isolated: {list}, without a thread of the daemon (option cpus= of a source puts its threads there)"
        ),
        threads => format!("; isolated: {list}, with {threads} threads of the daemon"),
    }
}

/// The spans of a list of CPUs, as `2-3,6`.
fn spans(list: &str) -> impl Iterator<Item = RangeInclusive<u32>> {
    list.split(',').filter_map(|span| {
        let (first, last) = span.split_once('-').unwrap_or((span, span));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    })
}
