//! `vnplug metrics` beside a real Prometheus: every query of the dashboard has an answer, alerts fire on real faults, and
//! who may see counters may do nothing else.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use vnplug::{Client, Error, Next, PortOptions};
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::station::Running;
use vnplug_e2e::stopped::Stopped;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::{VmKind, VmSpec};
use vnplug_testing::{eventually, until};

/// Asks by HTTP; the body of the answer.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let patience = Some(Duration::from_secs(30));
    stream.set_read_timeout(patience).unwrap();
    let ask = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(ask.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    body.to_owned()
}

/// `vnplug-metrics` of a daemon, as an ordinary user; and where it listens.
fn metrics(lab: &Lab, daemon: &Daemon, more: &[&str]) -> (Running, String) {
    metrics_named("metrics", lab, daemon, more)
}

/// The same with files of its own, for several at once.
fn metrics_named(name: &str, lab: &Lab, daemon: &Daemon, more: &[&str]) -> (Running, String) {
    let mut command = Command::new("setpriv");
    let user = USER.to_string();
    command.args(["--reuid", &user, "--clear-groups"]);
    command.arg(program("vnplug-metrics").unwrap());
    command.arg("--socket").arg(daemon.socket());
    command.args(["--listen", "127.0.0.1:0"]).args(more);
    let running = Running::start(command, lab, name).unwrap();
    let line = until(
        "it listens",
        || running.output(),
        |line| line.ends_with('\n'),
    );
    let address = line.trim().strip_prefix("vnplug-metrics: http://").unwrap();
    let address = address.strip_suffix("/metrics").unwrap().to_owned();
    (running, address)
}

/// A source of every kind, a switch with an uplink, a VM; everybody may connect, and the ordinary user sees all counters.
fn daemon(lab: &Lab, netns: &Netns) -> Daemon {
    netns.veth("wire0", "wire1").unwrap();
    netns.veth("up0", "up1").unwrap();
    let config = open_to_all(lab, &format!("observers = [{USER}]\n"));
    let arguments = [
        "--config",
        &config,
        "--source",
        "wire1=af_packet,early=no",
        "--source",
        "lab=gen,pps=20000,flows=10",
        "--switch",
        "lan0,uplink=up0",
    ];
    let daemon = Daemon::start(lab, Some(netns), &arguments).unwrap();
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
    daemon
}

#[test]
fn an_observer_sees_all_counters_and_may_do_nothing_else() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let daemon = daemon(&lab, &netns);
    let _port = daemon.port("lab").open().unwrap();
    let socket = daemon.socket();
    let (counted, denied) = as_user(move || {
        let mut client = Client::connect_to(&socket).unwrap();
        let counted = client.stats().unwrap();
        assert_eq!(client.show_switch("", 0, true).unwrap()[0].name, "lan0");
        assert_eq!(client.devices().unwrap().len(), 0);
        let denied = [
            client.set_switch("lan0", 0, "age=1", false).err(),
            client.detach_vm("probe").err(),
            client.grants().err(),
            PortOptions::new("lab").socket(socket).open().err(),
        ];
        (counted, denied)
    });
    let kinds: Vec<&str> = counted.iter().map(|it| it.kind.as_str()).collect();
    for kind in ["daemon", "source", "port", "vm"] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    for refusal in denied {
        assert!(
            matches!(refusal, Some(Error::Refused { .. })),
            "{refusal:?}"
        );
    }
    // The control: another user sees none of it.
    let socket = daemon.socket();
    let other = thread::spawn(move || {
        let uid = rustix::process::Uid::from_raw(USER + 1);
        rustix::thread::set_thread_uid(uid).unwrap();
        Client::connect_to(&socket).unwrap().stats().unwrap()
    });
    assert_eq!(other.join().unwrap(), []);
}

#[test]
fn so_many_ports_have_series_of_their_own_as_is_said() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let daemon = daemon(&lab, &netns);
    let _ports = [(); 3].map(|()| daemon.port("lab").open().unwrap());
    for (more, series, left_out) in [(&["--max-ports", "2"][..], 2, "1.0"), (&[], 3, "0.0")] {
        let (_metrics, address) = metrics(&lab, &daemon, more);
        let text = get(&address, "/metrics");
        let ports = text.matches("\nvnplug_port_info{").count();
        assert_eq!(ports, series, "{more:?}: {text}");
        let line = format!("\nvnplug_ports_left_out {left_out}\n");
        assert!(text.contains(&line), "{more:?}: {text}");
    }
}

/// Debian's, as `e2e/get-prometheus.sh` unpacks it.
fn unpacked(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = root.join("target/prometheus/usr/bin").join(name);
    assert!(path.is_file(), "no {name}: run e2e/get-prometheus.sh first");
    path
}

fn dist(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../dist/metrics")
        .join(name)
}

#[test]
fn each_alert_fires_on_its_fault_and_on_no_other() {
    let tested = Command::new(unpacked("promtool"))
        .args(["test", "rules"])
        .arg(dist("vnplug.rules.test.yml"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[tested.stdout, tested.stderr].concat()).into_owned();
    assert!(tested.status.success(), "{said}");
    // The control: a rule that is another one is found out.
    let lab = Lab::new().unwrap();
    for name in ["vnplug.rules.test.yml", "vnplug.rules.yml"] {
        let text = fs::read_to_string(dist(name)).unwrap();
        fs::write(
            lab.dir().join(name),
            text.replace("vnplug_up == 0", "vnplug_up == 2"),
        )
        .unwrap();
    }
    let tested = Command::new(unpacked("promtool"))
        .args(["test", "rules"])
        .arg(lab.dir().join("vnplug.rules.test.yml"))
        .output()
        .unwrap();
    assert!(!tested.status.success());
}

fn encoded(query: &str) -> String {
    query.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// A Prometheus that scrapes every second.
struct Prometheus {
    _running: Running,
    address: String,
}

impl Prometheus {
    fn start(lab: &Lab, scraped: &[&str]) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let config = lab.dir().join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
             rule_files: [{}]\n\
             scrape_configs: [{{job_name: vnplug, static_configs: [{{targets: {scraped:?}}}]}}]\n",
            dist("vnplug.rules.yml").display()
        );
        fs::write(&config, text).unwrap();
        let mut command = Command::new(unpacked("prometheus"));
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}/tsdb", lab.dir().display()));
        command.arg(format!("--web.listen-address={address}"));
        let mut running = Running::start(command, lab, "prometheus").unwrap();
        // It listens before it can answer.
        eventually("Prometheus is ready", || {
            assert!(running.status().is_none(), "{}", running.errors());
            TcpStream::connect(&address).is_ok() && get(&address, "/-/ready").contains("is Ready")
        });
        Self {
            _running: running,
            address,
        }
    }

    /// All that is answered to a query.
    fn answer(&self, query: &str) -> Value {
        let path = format!("/api/v1/query?query={}", encoded(query));
        serde_json::from_str(&get(&self.address, &path)).unwrap()
    }

    /// The answer to a query: its series.
    fn ask(&self, query: &str) -> Vec<Value> {
        let answer = self.answer(query);
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        answer["data"]["result"].as_array().unwrap().clone()
    }

    /// The values of a label, as Grafana asks for `label_values(METRIC, LABEL)`.
    fn values(&self, metric: &str, label: &str) -> Vec<Value> {
        let metric = encoded(metric);
        let path = format!("/api/v1/label/{label}/values?match%5B%5D={metric}");
        let text = get(&self.address, &path);
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["status"], "success", "{metric}, {label}: {text}");
        answer["data"].as_array().unwrap().clone()
    }

    /// Waits until a query has an answer, or none.
    fn becomes(&self, query: &str, there: bool) {
        until(query, || self.ask(query), |found| found.is_empty() != there);
    }
}

fn dashboard() -> Value {
    serde_json::from_str(&fs::read_to_string(dist("dashboard.json")).unwrap()).unwrap()
}

/// A query of the dashboard, with its variables as Grafana fills them in for all sources of these instances.
#[derive(Debug)]
struct Query {
    panel: String,
    text: String,
    legend: String,
}

fn filled(query: &str, instances: &str) -> String {
    let query = query
        .replace("$__rate_interval", "15s")
        .replace("$instance", instances)
        .replace("$source", ".*");
    assert!(!query.contains('$'), "{query}");
    query
}

fn queries(instances: &str) -> Vec<Query> {
    let mut all = Vec::new();
    for panel in dashboard()["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let [panel, text, legend] = [&panel["title"], &target["expr"], &target["legendFormat"]]
                .map(|it| it.as_str().unwrap().to_owned());
            let chosen = text.matches(r#"{instance=~"$instance""#).count();
            assert_eq!(chosen, text.matches("vnplug_").count(), "{text}");
            let text = filled(&text, instances);
            all.push(Query {
                panel,
                text,
                legend,
            });
        }
    }
    assert!(all.len() > 20, "{}", all.len());
    all
}

/// The counters of frames that a panel shows, one a word.
fn shown(panel: &str) -> BTreeSet<String> {
    let all = queries(".*");
    let texts = all.iter().filter(|it| it.panel == panel);
    let words = texts.flat_map(|it| it.text.split(|c: char| !c.is_alphanumeric() && c != '_'));
    let words = words.filter(|it| it.starts_with("vnplug_") || it.ends_with("dropped"));
    words.map(str::to_owned).collect()
}

#[test]
fn what_is_lost_is_the_same_in_each_panel() {
    let lost = shown("Lost in the last hour");
    assert!(lost.len() >= 7, "{lost:?}");
    assert_eq!(shown("Loss by stage"), lost);
}

/// The variables of the dashboard that are lists of a label's values: the metric, and the label.
fn variables() -> Vec<(String, String)> {
    let dashboard = dashboard();
    let list = dashboard["templating"]["list"].as_array().unwrap();
    let asked = list.iter().filter(|it| it["type"] == "query");
    let parts = asked.map(|it| {
        let query = it["query"].as_str().unwrap();
        let inner = query.strip_prefix("label_values(");
        let inner = inner.and_then(|it| it.strip_suffix(')'));
        let (metric, label) = inner.and_then(|it| it.split_once(", ")).expect(query);
        assert_eq!(
            (&it["includeAll"], &it["multi"]),
            (&true.into(), &true.into())
        );
        assert_eq!(it["current"]["value"], "$__all");
        (filled(metric, ".*"), label.to_owned())
    });
    let all: Vec<_> = parts.collect();
    assert_eq!(all.len(), 2, "{all:?}");
    all
}

/// The expression of an alert.
fn rule(name: &str) -> String {
    let text = fs::read_to_string(dist("vnplug.rules.yml")).unwrap();
    let (_, rest) = text.split_once(&format!("- alert: {name}\n")).unwrap();
    let (expression, _) = rest.split_once("for: 1m").unwrap();
    let expression = expression.trim().strip_prefix("expr:").unwrap();
    expression.replace(">-", "").replace("[5m]", "[15s]")
}

#[test]
fn every_query_of_the_dashboard_has_an_answer_and_alerts_see_real_faults() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let mut daemon = daemon(&lab, &netns);
    // Two with the same sources and the same ports, as two hosts may have.
    let (_metrics, address) = metrics(&lab, &daemon, &[]);
    let (second, other) = metrics_named("second", &lab, &daemon, &[]);
    let prometheus = Prometheus::start(&lab, &[&address, &other]);
    let mut reader = daemon.port("lab").open().unwrap();
    let _sender = daemon.port("wire1").transmit(1 << 16).open().unwrap();
    let _member = daemon.port("lan0").join().transmit(1 << 16).open().unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (over, netns) = (&over, &netns);
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                while let Next::Packet(_) = reader.next().unwrap() {}
                thread::sleep(Duration::from_millis(5));
            }
        });
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let stream = Stream {
                    pps: NonZeroU64::new(2000),
                    ..Stream::new("wire0", 1000)
                };
                // The wire may be down just now.
                let _ = netns.enter(|| stream.send());
            }
        });
        let faults = || {
            prometheus.becomes("count(vnplug_up == 1) == 2", true);
            let down = rule("VnplugSourceDown");
            let [lost, dropped] = ["VnplugReaderLoses", "VnplugKernelDrops"].map(rule);
            // The controls: nothing is wrong yet.
            prometheus.becomes(
                "rate(vnplug_port_offered_frames_total{fate=\"delivered\"}[15s]) > 0",
                true,
            );
            for quiet in [&down, &lost, &dropped] {
                assert_eq!(prometheus.ask(quiet), [] as [Value; 0], "{quiet}");
            }
            // A reader that does not read.
            let _stuck = daemon.port("lab").ring_bytes(4096).open().unwrap();
            prometheus.becomes(&format!("count(count by (instance) ({lost})) == 2"), true);
            let mut odd = Vec::new();
            for Query {
                panel,
                text,
                legend,
            } in queries(".*")
            {
                let answer = prometheus.ask(&text);
                let is_odd = |series: &Value| {
                    let value = series["value"][1].as_str().unwrap();
                    // A line that is one of several says of which host it is.
                    let labels = series["metric"].as_object().unwrap();
                    let is_told = labels.contains_key("instance")
                        && labels.keys().all(|label| {
                            let only_here = ["__name__", "job"].contains(&label.as_str());
                            only_here || legend.contains(&format!("{{{{{label}}}}}"))
                        });
                    value.parse::<f64>().map_or(true, f64::is_nan)
                        || !(labels.is_empty() || is_told)
                };
                if answer.is_empty() || answer.iter().any(is_odd) {
                    odd.push(format!("{panel}: {text}: {legend}: {answer:?}"));
                }
            }
            assert!(odd.is_empty(), "{odd:#?}");
            // The control: hosts that are not told apart have no answer.
            let mixed = "sum by (port) (vnplug_port_bytes_total) * on (port) group_left (reader) vnplug_port_info";
            assert_eq!(prometheus.answer(mixed)["status"], "error");
            // A host that was chosen and has nothing has lost nothing.
            for query in queries("nowhere") {
                let answer = prometheus.ask(&query.text);
                let zero = answer.iter().all(|it| it["value"][1] == "0");
                let is_sum = query.panel == "Lost in the last hour";
                assert!(
                    zero && (!is_sum || answer.len() == 1),
                    "{query:?}: {answer:?}"
                );
            }
            for (metric, label) in variables() {
                let values = prometheus.values(&metric, &label);
                let wanted = match label.as_str() {
                    "instance" => [&*address, &other],
                    _ => ["lab", "wire1"],
                };
                for value in wanted {
                    assert!(values.contains(&value.into()), "{metric}: {values:?}");
                }
                // The control: what no series has is no list.
                assert_eq!(prometheus.values(&metric, "nothing"), [] as [Value; 0]);
            }
            // A daemon that does not run, for a while.
            let stopped = Stopped::new(&[daemon.pid()]);
            // More than its receive ring of 96 MiB has room for.
            let flood = Stream {
                len_bytes: 1514,
                ..Stream::new("wire0", 150_000)
            };
            let flood = netns.enter(|| flood.send());
            drop(stopped);
            flood.unwrap().unwrap();
            prometheus.becomes(&dropped, true);
            // An interface that is down.
            netns.ip(&["link", "set", "wire1", "down"]).unwrap();
            prometheus.becomes(&down, true);
            // Who sends there goes on, and ends.
            netns.ip(&["link", "set", "wire1", "up"]).unwrap();
            prometheus.becomes(&down, false);
        };
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(faults));
        over.store(true, Ordering::Relaxed);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    daemon.kill();
    prometheus.becomes(&rule("VnplugDown"), true);
    daemon.launch().unwrap();
    prometheus.becomes(&rule("VnplugDown"), false);
    // Nobody to ask.
    drop(second);
    prometheus.becomes(&rule("VnplugDown"), true);
    // A sum that does not close, and a NIC that loses, need a bug and hardware: `promtool` alone shows those.
    assert_eq!(
        prometheus.ask(&rule("VnplugAccountsOpen")),
        [] as [Value; 0]
    );
}

/// Kilobytes that a process has in memory.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

#[test]
fn a_hundred_clients_at_once_have_whole_answers_and_readers_lose_nothing() {
    const CLIENTS: usize = 100;
    const EACH: usize = 5;
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let daemon = daemon(&lab, &netns);
    let (metrics, address) = metrics(&lab, &daemon, &[]);
    let mut reader = daemon.port("lab").ring_bytes(8 << 20).open().unwrap();
    // Ports make answers long.
    let _ports: Vec<_> = (0..200)
        .map(|_| daemon.port("lan0").open().unwrap())
        .collect();
    let lines = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    let alone = get(&address, "/metrics");
    let wanted = lines(&alone);
    assert!(wanted > 1000 && alone.ends_with('\n'), "{wanted} lines");
    let pids = [daemon.pid(), metrics.pid()];
    let before = pids.map(resident);
    let over = AtomicBool::new(false);
    let read = thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let mut read = 0_u64;
            loop {
                let last = over.load(Ordering::Relaxed);
                while let Next::Packet(packet) = reader.next().unwrap() {
                    assert_eq!(packet.meta.lost, 0);
                    read += 1;
                }
                if last {
                    return read;
                }
                reader.wait(Some(Duration::from_millis(20))).unwrap();
            }
        });
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let ask = |_| {
                        // The daemon is asked for each of these times.
                        thread::sleep(Duration::from_millis(600));
                        get(&address, "/metrics")
                    };
                    (0..EACH).map(ask).collect::<Vec<_>>()
                })
            })
            .collect();
        let answers = clients.into_iter().map(|client| client.join());
        let answers: Vec<_> = answers.collect();
        over.store(true, Ordering::Relaxed);
        for text in answers.into_iter().flat_map(|it| it.unwrap()) {
            assert!(text.contains("\nvnplug_up 1.0\n"), "{text}");
            // As many series as for one; a time of a second more or less is a value.
            assert_eq!(lines(&text), wanted);
            assert!(text.ends_with('\n'));
        }
        reads.join().unwrap()
    });
    assert!(read > 0);
    assert_eq!(reader.counts().lost, 0);
    daemon.audit();
    let after = pids.map(resident);
    println!(
        "{} answers of {} bytes; daemon {} to {} kB, vnplug-metrics {} to {} kB",
        CLIENTS * EACH,
        alone.len(),
        before[0],
        after[0],
        before[1],
        after[1]
    );
    // A hundred answers at once are one text.
    assert!(after[0] <= before[0] + (8 << 10), "{before:?} {after:?}");
    assert!(after[1] <= before[1] + (32 << 10), "{before:?} {after:?}");
}
