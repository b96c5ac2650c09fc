//! The page's answer about what the daemon does, of a real daemon.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vnplug::{Client, Next};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::station::Running;
use vnplug_e2e::user::{USER, open_to_all};
use vnplug_ring::control::{VmKind, VmSpec};
use vnplug_testing::until;

/// `vnplug-web` without recordings, and where it listens; as another user if one is given.
fn page(lab: &Lab, daemon: &Daemon, user: Option<u32>) -> (Running, String) {
    let mut command = match user {
        Some(user) => {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", &user.to_string(), "--clear-groups"]);
            command.arg(program("vnplug-web").unwrap());
            command
        }
        None => Command::new(program("vnplug-web").unwrap()),
    };
    command.arg("--socket").arg(daemon.socket());
    command.args(["--listen", "127.0.0.1:0"]);
    let running = Running::start(command, lab, &format!("web{}", user.unwrap_or(0))).unwrap();
    let line = until("it listens", || running.output(), |it| it.ends_with('\n'));
    let address = line.trim().strip_prefix("vnplug-web: http://").unwrap();
    let address = address.trim_end_matches('/').to_owned();
    (running, address)
}

fn now(address: &str) -> Value {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let ask = format!("GET /api/now HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(ask.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"))
}

/// The row of this name.
fn row<'a>(json: &'a Value, table: &str, name: &str) -> &'a Value {
    let rows = json[table].as_array().unwrap();
    let found = rows.iter().find(|row| row["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {json:#}"))
}

#[test]
fn rates_losses_and_a_restart_are_those_of_the_daemon() {
    let lab = Lab::new().unwrap();
    let sources = ["--source", "lab=gen,pps=20000,flows=10"];
    let mut daemon = Daemon::start(&lab, None, &sources).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let spec = VmSpec {
        name: "probe".into(),
        kind: VmKind::Qemu,
        pool_bytes: 1 << 20,
        vectors: 0,
        allow: Vec::new(),
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    };
    operator.attach_vm(spec).unwrap();
    let (_page, address) = page(&lab, &daemon, None);
    let mut reader = daemon.port("lab").label("a reader").open().unwrap();
    let _stuck = daemon
        .port("lab")
        .ring_bytes(4096)
        .label("stuck")
        .open()
        .unwrap();
    let read_some = |reader: &mut vnplug::Port| while let Ok(Next::Packet(_)) = reader.next() {};
    let json = until(
        "rates and a loss",
        || {
            read_some(&mut reader);
            now(&address)
        },
        |json| {
            let of = |pointer| json.pointer(pointer).and_then(Value::as_f64).unwrap_or(0.0);
            of("/sources/0/seen") > 1000.0 && of("/stages/2/now") > 1000.0
        },
    );
    assert_eq!(json["sees_all"], true, "{json:#}");
    assert_eq!(row(&json, "ports", "1")["reader"], "a reader");
    let stuck = row(&json, "ports", "2");
    assert!(stuck["losing"].as_f64().unwrap() > 1000.0, "{json:#}");
    assert_eq!(json["ports"][0]["name"], "2", "what loses comes first");
    assert_eq!(row(&json, "vms", "probe")["pool_bytes"], 1 << 20);
    // What it says it lost is what the daemon counts.
    let counted = operator.stats().unwrap();
    let stuck_now = counted
        .iter()
        .find(|it| it.kind == "port" && it.name == "2")
        .unwrap();
    let told = stuck["lost"].as_u64().unwrap();
    assert!(told > 0 && told <= vnplug_ring::counters::lost(stuck_now));
    daemon.kill();
    let away = until(
        "it is away",
        || now(&address),
        |json| !json["error"].is_null(),
    );
    assert_eq!(
        row(&away, "sources", "lab")["kind"],
        "gen",
        "the last figures stay"
    );
    daemon.launch().unwrap();
    let back = until(
        "it is back",
        || now(&address),
        |json| json["error"].is_null(),
    );
    assert_eq!(back["restarts"], 1, "{back:#}");
}

#[test]
fn only_an_observer_shows_what_others_do() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, &format!("observers = [{USER}]\n"));
    let source = ["--config", &config, "--source", "lab=gen,pps=100"];
    let daemon = Daemon::start(&lab, None, &source).unwrap();
    let _port = daemon.port("lab").label("root's").open().unwrap();
    let (_page, address) = page(&lab, &daemon, Some(USER));
    let json = now(&address);
    assert_eq!(row(&json, "ports", "1")["reader"], "root's");
    let (_page, address) = page(&lab, &daemon, Some(USER + 1));
    let json = now(&address);
    assert_eq!(
        (&json["sees_all"], &json["ports"]),
        (&false.into(), &Value::Array(Vec::new()))
    );
}
