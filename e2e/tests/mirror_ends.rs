//! Where mirrors end: the kernel's tunnel devices as sources, of a stock kernel that has them all. The daemon runs in a QEMU guest, so
//! that nothing depends on what the kernel of this machine was built with.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use vnplug_e2e::attached::{image, summary};
use vnplug_e2e::daemon::program;
use vnplug_e2e::{Guest, Job, Lab, Qemu, QemuConfig};
use vnplug_testing::{PATIENCE, eventually};

/// A device's type and its words; Geneve has no end of its own.
const KINDS: [&str; 6] = [
    "vxlan id 7 dstport 4789 local LOCAL remote REMOTE",
    "geneve id 7 remote REMOTE",
    "gretap key 7 local LOCAL remote REMOTE",
    // Its packets have no key, and a device with one does not find them.
    "erspan erspan_ver 0 local LOCAL remote REMOTE",
    "erspan seq key 11 erspan_ver 1 erspan 1 local LOCAL remote REMOTE",
    "erspan seq key 12 erspan_ver 2 erspan_dir ingress erspan_hwid 3 local LOCAL remote REMOTE",
];
/// A source whose ring fits a small guest.
const RING: &str = "af_packet,block_size=128K,blocks=32";
/// Frames that are sent through each.
const FRAMES: usize = 300;
/// What compiles filters.
const LIBPCAP: &str = "/usr/lib/x86_64-linux-gnu/libpcap.so.0.8";
const FAR: &str = "192.0.2.1";
const NEAR: &str = "192.0.2.2";

/// A program that was built here without what only a debugger reads: the guest holds it in memory.
fn stripped(lab: &Lab, name: &str) -> PathBuf {
    let small = lab.dir().join(name);
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&small).arg(program(name).unwrap());
    assert!(strip.status().unwrap().success());
    small
}

/// Its output; panics if it fails.
fn must(guest: &Guest, command: &str) -> String {
    let output = guest.run(&format!("{{ {command}\n}} 2>&1"), PATIENCE);
    let output = output.unwrap();
    assert_eq!(output.status, 0, "{command}: {}", output.text());
    output.text()
}

/// A guest with two namespaces that a wire joins.
fn boot(lab: &Lab, modules: &[&str]) -> Guest {
    let mut image = image()
        .unwrap()
        .program_at("/usr/sbin/ip", "/sbin/ip")
        .program_at(LIBPCAP, LIBPCAP)
        .program(stripped(lab, "vnplugd"))
        .program(stripped(lab, "wiregen"));
    for module in modules {
        image = image.module(*module);
    }
    let config = QemuConfig {
        memory_mib: 512,
        image,
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(lab, config).unwrap_or_else(|error| panic!("{error}"));
    let wire = "/sbin/ip netns add far && /sbin/ip netns add near
        /sbin/ip -n far link add wire0 mtu 1700 type veth peer name wire1 mtu 1700 netns near
        /sbin/ip -n far addr add FAR/24 dev wire0 && /sbin/ip -n near addr add NEAR/24 dev wire1
        /sbin/ip -n far link set wire0 up && /sbin/ip -n near link set wire1 up";
    must(&guest, &wire.replace("FAR", FAR).replace("NEAR", NEAR));
    guest
}

/// What makes the device `mirrorN` of a kind in both namespaces.
fn ends(number: usize, kind: &str) -> String {
    let end = |netns, local, remote| {
        let kind = kind.replace("LOCAL", local).replace("REMOTE", remote);
        format!(
            "/sbin/ip -n {netns} link add mirror{number} mtu 1600 type {kind} && \
             /sbin/ip -n {netns} link set mirror{number} up"
        )
    };
    format!("{} && {}", end("far", FAR, NEAR), end("near", NEAR, FAR))
}

/// What a switch or a cloud mirrors into a tunnel is read from the tunnel's device, as it was before.
#[test]
fn each_tunnel_of_a_stock_kernel_is_a_source() {
    let lab = Lab::new().unwrap();
    let guest = boot(&lab, &["veth", "vxlan", "geneve", "ip_gre"]);
    let mut sources = String::new();
    for (number, kind) in KINDS.iter().enumerate() {
        must(&guest, &ends(number, kind));
        sources += &format!(" --source mirror{number}={RING}");
    }
    // The kernel keeps few frames for a neighbour that it does not know yet.
    let ping = format!("/sbin/ip netns exec far ping -c 1 -W 20 {NEAR} >/dev/null");
    must(&guest, &ping);
    let daemon = format!(
        "exec /sbin/ip netns exec near vnplugd --socket /run/vnplug.sock --pool-dir /dev/shm \
         {sources} --source wire1={RING} 2>/run/log"
    );
    let daemon = guest.spawn(&daemon).unwrap();
    let vnplug = "vnplug --socket /run/vnplug.sock";
    must(
        &guest,
        &format!(
            "for n in $(seq 200); do {vnplug} list >/dev/null 2>&1 && exit; sleep 0.2; done
            cat /run/log; exit 1"
        ),
    );
    let count = |source: &str, packets: usize, more: &str| {
        let command = format!(
            "exec {vnplug} count host:{source} --packets {packets} --seconds 100 --json {more} 2>&1"
        );
        guest.spawn(&command).unwrap()
    };
    let inside: Vec<Job> = (0..KINDS.len())
        .map(|number| count(&format!("mirror{number}"), FRAMES, "--filter udp --witness"))
        .collect();
    // The control: the packets come in tunnels, 1,514 bytes with outer headers around them.
    let all = KINDS.len() * FRAMES;
    let outside = count("wire1", all, "--filter 'greater 1520'");
    eventually("each has a port", || {
        let text = guest.run(&format!("{vnplug} stats --json"), PATIENCE);
        let said: Value = serde_json::from_str(&text.unwrap().text()).unwrap_or_default();
        let counted = said["counters"].as_array();
        counted
            .is_some_and(|all| all.iter().filter(|it| it["kind"] == "port").count() > KINDS.len())
    });
    for number in 0..KINDS.len() {
        let sent = "/sbin/ip netns exec far wiregen --size 1514 --flows 9 --pps 1000";
        must(
            &guest,
            &format!("{sent} --interface mirror{number} --count {FRAMES}"),
        );
    }
    let of = |job: Job, what: &str| {
        let output = job.wait(PATIENCE).unwrap();
        let text = output.text();
        assert_eq!(output.status, 0, "{what}: {text}");
        summary(&text).unwrap()
    };
    for (job, kind) in inside.into_iter().zip(KINDS) {
        let seen = of(job, kind);
        assert_eq!(seen["packets"], FRAMES, "{kind}: {seen}");
        assert_eq!(seen["witness"]["perfect"], true, "{kind}: {seen}");
        assert_eq!(seen["witness"]["received"], FRAMES, "{kind}: {seen}");
    }
    let seen = of(outside, "the interface below");
    assert_eq!(seen["packets"], all, "{seen}");
    daemon.signal("TERM").unwrap();
    let ended = daemon.wait(PATIENCE).unwrap();
    assert!(ended.success(), "{}", ended.text());
}

/// The test above fails where the kernel lacks a module.
#[test]
fn a_kernel_without_the_module_has_no_such_device() {
    let lab = Lab::new().unwrap();
    let guest = boot(&lab, &["veth"]);
    for (number, kind) in KINDS.iter().enumerate() {
        let command = format!("{{ {}; }} 2>&1", ends(number, kind));
        let output = guest.run(&command, PATIENCE).unwrap();
        let text = output.text();
        assert_ne!(output.status, 0, "{kind}");
        assert!(text.contains("Unknown device type"), "{kind}: {text}");
    }
}
