//! What a newer daemon wrote down: this one serves what it can, refuses the rest by name, and spoils nothing for the newer one.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use vnplug::Client;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, label};
use vnplug_ring::control::{Grant, VmKind, VmSpec};

fn attach(daemon: &Daemon, name: &str, kind: VmKind, owner: u64) -> Result<(), String> {
    let spec = VmSpec {
        name: name.into(),
        kind,
        pool_bytes: 2 << 20,
        vectors: 0,
        allow: vec![Grant {
            source: "lab".into(),
            filter: String::new(),
        }],
        owner,
        groups: Vec::new(),
        stays_for: None,
    };
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let attached = client.attach_vm(spec);
    attached.map(drop).map_err(|error| error.to_string())
}

/// Each VM's state.
fn states(daemon: &Daemon) -> Vec<(String, String)> {
    let all = daemon.audit();
    let vms = all.iter().filter(|it| it.kind == "vm");
    let mut states: Vec<_> = vms
        .map(|it| (it.name.clone(), label(it, "state").to_owned()))
        .collect();
    states.sort();
    states
}

fn is_broken(states: &[(String, String)], name: &str) -> bool {
    states
        .iter()
        .any(|(it, state)| it == name && state == "broken")
}

#[test]
fn a_vm_with_what_this_daemon_does_not_know_is_left_for_the_newer_one() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    attach(&daemon, "plain", VmKind::Qemu, 1).unwrap();
    attach(&daemon, "newer", VmKind::Qemu, 2).unwrap();
    let vms = daemon.socket().parent().unwrap().join("vms");
    let path = |name: &str| vms.join(format!("{name}.toml"));
    let plain = fs::read_to_string(path("plain")).unwrap();
    // An older daemon finds no word that it does not know, of what this VM does not have.
    for word in ["groups", "apart", "pmem", "held"] {
        assert!(!plain.contains(word), "{plain}");
    }
    let newer = fs::read_to_string(path("newer")).unwrap();
    daemon.kill();
    fs::write(path("newer"), format!("shiny = true\n{newer}")).unwrap();
    // One of an older daemon has less.
    let old = plain.lines().filter(|line| !line.starts_with("owner"));
    fs::write(path("plain"), old.collect::<Vec<_>>().join("\n")).unwrap();
    let pool = newer
        .lines()
        .find_map(|line| line.strip_prefix("pool = \""));
    let pool = PathBuf::from(pool.unwrap().trim_end_matches('"'));
    let file = || fs::metadata(&pool).map(|it| (it.ino(), it.len())).unwrap();
    let before = file();
    daemon.launch().unwrap();
    let now = states(&daemon);
    assert!(
        is_broken(&now, "newer") && !is_broken(&now, "plain"),
        "{now:?}"
    );
    assert!(daemon.log().contains("unknown field `shiny`"));
    // Another's machine gets neither its name nor its memory.
    let refused = attach(&daemon, "newer", VmKind::Qemu, 3).unwrap_err();
    assert!(refused.contains("detach it first"), "{refused}");
    assert_eq!(file(), before);
    // The newer daemon, which is this one without the word.
    daemon.end();
    fs::write(path("newer"), &newer).unwrap();
    daemon.launch().unwrap();
    let now = states(&daemon);
    assert!(!is_broken(&now, "newer") && now.len() == 2, "{now:?}");
    assert_eq!(file(), before);
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    client.detach_vm("newer").unwrap();
    assert!(!pool.exists());
}

#[test]
fn what_a_newer_daemon_kept_is_not_guessed_at_and_not_written_over() {
    let lab = Lab::new().unwrap();
    let args = ["--source", "lab=gen,pps=10", "--switch", "lan0"];
    let mut daemon = Daemon::start(&lab, None, &args).unwrap();
    let ok = |daemon: &Daemon, words: &[&str]| {
        let (code, said) = daemon.vnplug(words);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{words:?}");
    };
    ok(&daemon, &["switch", "set", "lan0", "age=60"]);
    ok(&daemon, &["source", "add", "--keep", "late=gen,pps=10"]);
    ok(&daemon, &["grant", "add", "uid:1=lab"]);
    let vms = daemon.socket().parent().unwrap().join("vms");
    let files = ["lan0.switch", "sources", "grants"].map(|name| vms.join(name));
    let texts = files
        .each_ref()
        .map(|path| fs::read_to_string(path).unwrap());
    daemon.kill();
    let shiny = texts.each_ref().map(|text| format!("shiny = true\n{text}"));
    let [switch, sources, grants] = &files;
    fs::write(switch, &shiny[0]).unwrap();
    fs::write(sources, &shiny[1]).unwrap();
    daemon.launch().unwrap();
    for (words, why) in [
        (
            &["switch", "set", "lan0", "age=70"][..],
            "not kept for a restart",
        ),
        (
            &["source", "add", "--keep", "more=gen,pps=10"],
            "not kept for the next daemon",
        ),
    ] {
        let (code, said) = daemon.vnplug(words);
        assert!(code != Some(0) && said.contains(why), "{said}");
        assert!(said.contains("unknown field `shiny`"), "{said}");
    }
    // What is for this daemon alone works.
    ok(&daemon, &["switch", "set", "lan0", "age=70", "--once"]);
    daemon.kill();
    for (path, (now, before)) in files.iter().zip(shiny.iter().zip(&texts)).take(2) {
        assert_eq!(fs::read_to_string(path).unwrap(), *now);
        fs::write(path, before).unwrap();
    }
    // Whose grant was taken would have it again.
    for wrong in [shiny[2].clone(), texts[2].replace("add", "suspend")] {
        fs::write(grants, &wrong).unwrap();
        let failed = daemon.launch().unwrap_err().to_string();
        assert!(failed.contains("perhaps by a newer vnplugd"), "{failed}");
        assert_eq!(fs::read_to_string(grants).unwrap(), wrong);
    }
    fs::write(grants, &texts[2]).unwrap();
    daemon.launch().unwrap();
    let listed = daemon.vnplug(&["grant", "list"]).1;
    assert!(listed.contains("run time"), "{listed}");
    let names: Vec<_> = daemon
        .audit()
        .into_iter()
        .filter(|it| it.kind == "source")
        .collect();
    assert_eq!(names.len(), 3);
}
