//! What can be wrong is said, with what to do; and the same without the fault works.

use std::process::Command;

use vnplug_path::source::af_xdp::{AfXdp, AfXdpConfig, Mode};
use vnplug_testing::eventually;
use vnplugd::spec::{Means, SourceSpec};

use crate::net::{Sender, ip, isolated, until_received};
use crate::{attached, config, one, veth};

fn error_of(config: AfXdpConfig) -> String {
    match AfXdp::open(config) {
        Ok(opened) => panic!("opened: {}", opened.how),
        Err(error) => error.to_string(),
    }
}

/// What a source of this text opens as: its kind and description, or the error.
fn kind_of(text: &str) -> Result<(&'static str, String), String> {
    let spec: SourceSpec = text.parse().map_err(|error| format!("{error}"))?;
    let open = spec
        .open(&Means::default())
        .map_err(|error| error.to_string())?;
    let source = open.start(0).map_err(|error| error.to_string())?;
    Ok((source.kind, source.description.clone()))
}

#[test]
fn an_interface_whose_driver_has_no_xdp_is_received_behind_the_driver_or_by_a_packet_socket() {
    isolated(|| {
        ip("link add br0 type bridge");
        ip("link set br0 up");
        let native = || AfXdpConfig {
            mode: Mode::Native,
            ..config("br0")
        };
        let error = error_of(native());
        assert!(
            error.contains("has no XDP of its own; use mode=generic"),
            "{error}"
        );
        let (kind, description) = kind_of("br0=af_xdp,mode=native").expect("falls back");
        assert_eq!(kind, "af_packet");
        assert!(
            description.contains("packet socket instead of XDP: the driver of"),
            "{description}"
        );
        let error = kind_of("br0=af_xdp,mode=native,fallback=no").expect_err("no fallback");
        assert!(error.contains("mode=generic"), "{error}");
        let (kind, description) = kind_of("br0=af_xdp").expect("generic");
        assert_eq!(kind, "af_xdp");
        assert!(description.contains("XDP generic"), "{description}");
        veth(1);
        let (kind, description) = kind_of("va=af_xdp,mode=native").expect("native");
        assert_eq!(kind, "af_xdp");
        assert!(description.contains("XDP native"), "{description}");
        let error = error_of(AfXdpConfig {
            mode: Mode::ZeroCopy,
            ..config("va")
        });
        assert!(
            error.contains("no zero-copy for queue 0; use mode=native"),
            "{error}"
        );
    });
}

#[test]
fn a_wrong_queue_is_named_with_those_that_there_are() {
    isolated(|| {
        veth(2);
        let with = |queues: &[u32]| AfXdpConfig {
            queues: queues.to_vec(),
            ..config("va")
        };
        let error = error_of(with(&[1, 2]));
        assert!(
            error.contains("no receive queue 2: it has 2 receive queues (0 to 1)"),
            "{error}"
        );
        assert!(error_of(with(&[1, 1])).contains("given twice"));
        // No packet socket would do: the queue is what was asked for.
        assert!(kind_of("va=af_xdp,queues=2").is_err());
        assert!(kind_of("va=af_xdp,queues=x").is_err());
        drop(one(with(&[1])));
    });
}

#[test]
fn a_program_that_is_there_already_is_named_and_left_alone() {
    isolated(|| {
        veth(1);
        let mut first = one(config("va"));
        let shown = attached("va").expect("attached");
        let id = shown
            .split("id ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        let id = id.expect("an id").to_owned();
        for mode in [Mode::Auto, Mode::Native, Mode::Generic] {
            let error = error_of(AfXdpConfig {
                mode,
                ..config("va")
            });
            assert!(
                error.contains(&format!("another XDP program, id {id} (\"vnplug_xdp\")")),
                "{error}"
            );
            assert!(error.contains("ip link set dev va xdp off"), "{error}");
        }
        assert_eq!(kind_of("va=af_xdp").expect("falls back").0, "af_packet");
        until_received(&Sender::new("vb"), first.as_mut());
        drop(first);
        until_received(&Sender::new("vb"), one(config("va")).as_mut());
        assert_eq!(attached("va"), None);
    });
}

#[test]
fn an_mtu_that_is_too_large_is_told_with_the_one_that_fits() {
    isolated(|| {
        veth(1);
        ip("link set va mtu 9000");
        ip("link set vb mtu 9000");
        let with = |frame_size| AfXdpConfig {
            multi_buffer: false,
            frame_size,
            ..config("va")
        };
        let error = error_of(with(2048));
        assert!(
            error.contains("MTU of 9000") && error.contains("mtu 1626)"),
            "{error}"
        );
        assert!(error.contains("frame_size=4096"), "{error}");
        let (kind, _) = kind_of("va=af_xdp,multi_buffer=no").expect("falls back");
        assert_eq!(kind, "af_packet");
        drop(one(config("va")));
        ip("link set va mtu 1626");
        ip("link set vb mtu 1626");
        drop(one(with(2048)));
        // The driver's own limit, whatever our chunks hold: the other end's frames.
        ip("link set va mtu 3650");
        // A program that was detached limits the other end for a moment longer.
        let mut grow = Command::new("ip");
        grow.args("link set vb mtu 9000".split(' '));
        eventually("the other end is no longer limited", || {
            grow.output().expect("run ip").status.success()
        });
        let error = error_of(AfXdpConfig {
            mode: Mode::Native,
            ..with(4096)
        });
        assert!(
            error.contains("refuses XDP with its present settings"),
            "{error}"
        );
    });
}

#[test]
fn a_limit_of_locked_memory_is_told() {
    const TELL: &str = "VNPLUG_TEST_LOCKED";
    if std::env::var_os(TELL).is_none() {
        let exe = std::env::current_exe().expect("this test");
        let output = Command::new("prlimit")
            .arg("--memlock=1048576:1048576")
            .arg(exe)
            .args(["--exact", "fault::a_limit_of_locked_memory_is_told"])
            .env(TELL, "1")
            .output()
            .expect("run prlimit");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("1 passed"), "{text}");
        return;
    }
    isolated(|| {
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
        veth(1);
        let whole = capabilities(None).expect("capabilities");
        let mut sets = whole;
        sets.effective
            .remove(CapabilitySet::IPC_LOCK | CapabilitySet::SYS_RESOURCE);
        set_capabilities(None, sets).expect("drop capabilities");
        let error = error_of(config("va"));
        assert!(
            error.contains("limit of locked memory") && error.contains("LimitMEMLOCK"),
            "{error}"
        );
        assert_eq!(kind_of("va=af_xdp").expect("falls back").0, "af_packet");
        assert_eq!(attached("va"), None);
        set_capabilities(None, whole).expect("raise capabilities");
        drop(one(config("va")));
    });
}

#[test]
fn other_mistakes_are_named() {
    isolated(|| {
        veth(1);
        for (text, part) in [
            ("nope=af_xdp", "no interface \"nope\" here"),
            ("va=af_xdp,direction=tx", "received frames alone"),
            ("va=af_xdp,mode=fast", "auto, zerocopy, native or generic"),
            ("va=af_xdp,frames=100", "power of two from 64"),
            ("va=af_xdp,frame_size=1024", "power of two from 2048"),
            ("va=af_xdp,busy_poll=99999", "at most 10000"),
            ("va=af_xdp,timestamps=now", "frame or batch"),
            ("va=af_xdp,colour=red", "no option \"colour\""),
        ] {
            let error = kind_of(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
        let mut sets = rustix::thread::capabilities(None).expect("capabilities");
        sets.effective = rustix::thread::CapabilitySet::NET_RAW;
        rustix::thread::set_capabilities(None, sets).expect("drop capabilities");
        let error = error_of(config("va"));
        assert!(error.contains("CAP_BPF and CAP_NET_ADMIN"), "{error}");
    });
}
