//! The memory that both instances of a switch's twin have, looked at and written by the kernel's own tool.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

use serde_json::Value;
use vnplug::Client;
use vnplug_e2e::containers::{Containers, address};
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::station::{answered, pings};

/// What `bpftool` says, as JSON.
fn bpftool(words: &[&str]) -> Value {
    let output = Command::new("bpftool").arg("-j").args(words).output();
    let output = output.expect("bpftool runs (package bpftool)");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "bpftool {words:?}: {said}");
    match said.trim() {
        "" => Value::Null,
        said => serde_json::from_str(said).unwrap(),
    }
}

/// The values of a map that has a name, in the order of their keys, in words of 8 bytes.
fn dumped(map: &str) -> Vec<Vec<u64>> {
    let byte =
        |it: &Value| u8::from_str_radix(it.as_str().unwrap().trim_start_matches("0x"), 16).unwrap();
    let value = |entry: &Value| {
        let bytes: Vec<u8> = entry["value"]
            .as_array()
            .unwrap()
            .iter()
            .map(byte)
            .collect();
        let words = bytes.chunks_exact(8);
        words
            .map(|it| u64::from_ne_bytes(it.try_into().unwrap()))
            .collect()
    };
    let all = bpftool(&["map", "dump", "pinned", map]);
    all.as_array().unwrap().iter().map(value).collect()
}

/// A station as the daemon tells it: its port, and for how long it was not heard.
fn told(daemon: &Daemon, switch: &str, station: &str) -> (String, u64) {
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let all = client.show_switch(switch, 0, true).unwrap();
    let found = all
        .iter()
        .find(|it| it.kind == "station" && it.name == station);
    let found = found.unwrap_or_else(|| panic!("no {station} in {all:?}"));
    (
        label(found, "switch_port").to_owned(),
        value(found, "age_s"),
    )
}

#[test]
fn bpftool_shows_the_one_table_and_what_it_writes_both_instances_have() {
    let site = Containers::new(2).unwrap();
    let switch = site.switch("/twin=on", ",stations=64");
    let daemon = Daemon::start(&site.lab, Some(&site.here), &["--switch", &switch]).unwrap();
    let [one, two] = [&site.all[0], &site.all[1]];
    assert!(pings(one, &address(2), &[]));
    assert_eq!(answered(one, &address(2), 100), 100);
    let [table, state] = ["table", "state"].map(|it| site.names().join(it).display().to_string());
    // What the daemon learned lies there, whole, at the port that the daemon tells.
    let switch = site.here.name();
    let stations = [one, two].map(|it| it.exec(&["cat", "/sys/class/net/eth0/address"]).unwrap());
    let stations = stations.map(|it| it.trim().to_owned());
    let slot_of = |station: &str| {
        let address = u64::from_str_radix(&station.replace(':', ""), 16).unwrap();
        let all = dumped(&table);
        let at = all.iter().position(|slot| slot[KEY] == 1 << 63 | address);
        let at = at.unwrap_or_else(|| panic!("no {station} in {all:x?}"));
        (at, all[at].clone())
    };
    for station in &stations {
        let (_, slot) = slot_of(station);
        assert_eq!(slot[WORD] & 1, 0, "torn");
        let (port, _) = told(&daemon, switch, station);
        assert_eq!(format!("{switch}/port{}", slot[WORD] >> 32 & 0xffff), port);
    }
    assert_eq!(
        dumped(&table).iter().filter(|slot| slot[KEY] != 0).count(),
        2
    );
    // It is one map: the daemon's, the program's, and the one with the name.
    let id = bpftool(&["map", "show", "pinned", &table])["id"]
        .as_u64()
        .unwrap();
    let line = format!("map_id:\t{id}");
    let infos = std::fs::read_dir(format!("/proc/{}/fdinfo", daemon.pid())).unwrap();
    let mut infos = infos
        .flatten()
        .filter_map(|it| std::fs::read_to_string(it.path()).ok());
    assert!(
        infos.any(|info| info.lines().any(|it| it == line)),
        "the daemon has no map {id}"
    );
    let programs = bpftool(&["prog", "show", "name", "vnplug_twin"]);
    let with = |it: &&Value| {
        it["map_ids"]
            .as_array()
            .is_some_and(|all| all.contains(&id.into()))
    };
    let all = programs
        .as_array()
        .cloned()
        .unwrap_or_else(|| vec![programs.clone()]);
    // The gate and the classifier.
    assert_eq!(all.iter().filter(with).count(), 2, "{programs}");
    // Counters are the same bytes.
    let by_kernel = || {
        let words = dumped(&state).remove(0);
        let ports_at = CPUS_AT + words[CPUS] as usize * CPU_WORDS;
        let ports = words[ports_at..].chunks_exact(PORT_WORDS);
        ports.map(|port| port[IN_FRAMES]).sum::<u64>()
    };
    let forwarded = || value(counted(&daemon.counters(), "source"), "twin_forwarded");
    let before = forwarded();
    assert!(before >= 200, "{before}");
    assert_eq!(by_kernel(), before);
    // What bpftool writes the daemon has, without a word to it: one was not heard for 200 seconds.
    let (at, mut slot) = slot_of(&stations[1]);
    slot[HEARD] -= 200;
    let hex = |bytes: &[u8]| bytes.iter().map(u8::to_string).collect::<Vec<_>>();
    let key = hex(&(at as u32).to_ne_bytes());
    let bytes = hex(&slot
        .iter()
        .flat_map(|it| it.to_ne_bytes())
        .collect::<Vec<_>>());
    let mut words = vec!["map", "update", "pinned", &table, "key"];
    words.extend(key.iter().map(String::as_str));
    words.push("value");
    words.extend(bytes.iter().map(String::as_str));
    bpftool(&words);
    let (_, age) = told(&daemon, switch, &stations[1]);
    assert!((200..260).contains(&age), "{age}");
    // And what the kernel instance writes bpftool and the daemon have: it was heard now.
    assert_eq!(answered(one, &address(2), 10), 10);
    let after = forwarded();
    assert!(after > before);
    assert_eq!(by_kernel(), after);
    let (_, again) = slot_of(&stations[1]);
    assert!(again[HEARD] >= slot[HEARD] + 200, "{again:x?} {slot:x?}");
    assert!(told(&daemon, switch, &stations[1]).1 < 60);
}

/// Words of a slot (`switch/src/table/slots.rs`).
const WORD: usize = 0;
const KEY: usize = 1;
const HEARD: usize = 2;
/// Words of what is beside the table (`switch/src/twin/layout.rs`): how many processors have a part, those parts, then ports.
const CPUS: usize = 3;
const CPUS_AT: usize = (256 + 4096 * 8) / 8;
const CPU_WORDS: usize = 8;
const PORT_WORDS: usize = 16;
const IN_FRAMES: usize = 1;
