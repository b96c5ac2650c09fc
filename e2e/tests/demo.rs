//! The demo's report: what a person reads, what a program reads, the picture.

use std::time::Duration;

use vnplug_e2e::demo::{Run, Traffic, Via, beaten, sentences, svg, table, to_json};

/// Offered packets, what was asked of the generator, captured ones, milliseconds of the processor.
fn run(via: Via, asked: Option<u64>, offered: u64, captured: u64, cpu_ms: u64) -> Run {
    Run {
        guest: "uml".to_owned(),
        via,
        traffic: Traffic::Small,
        asked_pps: asked,
        offered,
        captured,
        elapsed: Duration::from_secs(2),
        host_cpu: Duration::from_millis(cpu_ms),
    }
}

fn runs() -> Vec<Run> {
    let real = |via, offered, captured, cpu_ms| Run {
        traffic: Traffic::Real,
        ..run(via, None, offered, captured, cpu_ms)
    };
    vec![
        real(Via::Nic, 1_000, 990, 20),
        run(Via::Nic, Some(50_000), 100_000, 100_000, 100),
        run(Via::Nic, Some(500_000), 1_000_000, 500_000, 900),
        run(Via::Nic, None, 2_000_000, 500_000, 2_000),
        real(Via::Vnplug, 1_010, 1_010, 10),
        run(Via::Vnplug, Some(50_000), 100_000, 100_000, 50),
        run(Via::Vnplug, Some(500_000), 800_000, 800_000, 400),
        run(Via::Vnplug, None, 900_000, 899_999, 500),
    ]
}

#[test]
fn the_file_for_programs_has_every_run_with_both_rates_and_its_losses() {
    let json = to_json(&runs(), &["a note".to_owned()]);
    let text = |at: usize, name: &str| json["runs"][at][name].as_str().unwrap().to_owned();
    let number = |at: usize, name: &str| json["runs"][at][name].as_f64().unwrap();
    assert_eq!(
        [text(3, "guest"), text(3, "via"), text(3, "traffic")],
        ["uml", "nic", "small"]
    );
    assert_eq!((number(3, "offered"), number(3, "captured")), (2e6, 5e5));
    assert_eq!((number(3, "lost"), number(3, "lost_pct")), (1.5e6, 75.0));
    assert_eq!((number(3, "pps"), number(3, "host_cpu_s")), (1e6, 2.0));
    assert!(json["runs"][3]["asked_pps"].is_null());
    assert_eq!((number(6, "asked_pps"), number(6, "pps")), (5e5, 4e5));
    assert_eq!(json["runs"][6]["fell_short"], true);
    assert_eq!(json["runs"][2]["fell_short"], false);
    assert_eq!(json["runs"].as_array().unwrap().len(), 8);
    assert_eq!(json["notes"][0], "a note");
}

#[test]
fn the_table_puts_both_ways_of_a_load_below_each_other() {
    let table = table(&runs());
    let rows: Vec<&str> = table
        .lines()
        .filter(|line| line.starts_with("uml"))
        .collect();
    let ways: Vec<(bool, bool)> = rows
        .iter()
        .map(|row| (row.contains(" small "), row.contains(" vnplug ")))
        .collect();
    let both = |small| [(small, false), (small, true)];
    assert_eq!(
        ways,
        [both(false), both(true), both(true), both(true)].concat()
    );
    let words: Vec<&str> = rows[4].split_whitespace().collect();
    assert_eq!(
        words,
        [
            "uml",
            "small",
            "500,000",
            "nic",
            "500,000",
            "1,000,000",
            "500,000",
            "50.00",
            "0.90",
            "1.80"
        ]
    );
    // The generator reached less than was asked, and the table says so.
    assert!(rows[5].contains(" 400,000* "), "{}", rows[5]);
    assert!(table.contains("* less than was asked"));
}

#[test]
fn one_sentence_for_each_guest_tells_the_highest_rate_without_loss() {
    assert_eq!(
        sentences(&runs()),
        [
            "uml: of 60-byte frames its own NIC lost nothing up to 50,000 frames/s, vNPlug nothing up \
          to 400,000 frames/s."
        ]
    );
    let lossy = [
        run(Via::Nic, Some(50_000), 100_000, 99_999, 1),
        run(Via::Nic, Some(500_000), 1_000_000, 1_000_000, 1),
    ];
    assert_eq!(
        sentences(&lossy),
        ["uml: of 60-byte frames its own NIC lost some at every rate, vNPlug some at every rate."]
    );
}

#[test]
fn a_loss_where_the_nic_has_none_is_told() {
    assert!(beaten(&runs()).is_empty());
    // A NIC that was offered more, and lost nothing, is no fault of ours.
    let mut runs = vec![
        run(Via::Nic, None, 1_000_000, 1_000_000, 1),
        run(Via::Vnplug, None, 900_000, 900_000, 1),
    ];
    assert!(beaten(&runs).is_empty());
    runs[1].captured -= 1;
    assert_eq!(beaten(&runs).len(), 1);
}

#[test]
fn the_picture_has_a_mark_for_each_rate_and_all_its_tags_closed() {
    let svg = svg(&runs());
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(
        svg.matches("<text ").count(),
        svg.matches("</text>").count()
    );
    // One in the legend, and three rates in each of two panels; ours are round, the NIC's are not.
    assert_eq!(svg.matches("<circle ").count(), 1 + 2 * 3);
    assert_eq!(svg.matches("<polygon ").count(), 1 + 2 * 3);
    assert!(
        svg.contains("Highest rate without loss: vNPlug 400,000 frames/s, own NIC 50,000 frames/s")
    );
    assert!(svg.contains("vNPlug lost 0 of 1,010 packets, own NIC 10 of 1,000"));
}
