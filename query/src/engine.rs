//! DataFusion with our tables, for reading only.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::arrow::array::{
    BooleanBuilder, Int64Builder, RecordBatch, StringBuilder, TimestampNanosecondBuilder,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::common::{DataFusionError, ScalarValue};
use datafusion::datasource::MemTable;
use datafusion::datasource::file_format::parquet::ParquetFormat;
use datafusion::datasource::listing::{
    ListingOptions, ListingTable, ListingTableConfig, ListingTableUrl,
};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{DataFrame, SessionConfig, SessionContext, col, lit};
use datafusion::sql::parser::Statement;
use datafusion::sql::sqlparser::ast::Statement as Sql;

use crate::catalog::{Catalog, RowsAt, Scope, Segment};
use crate::community::community_id;
use crate::failure::Failure;
use crate::net::in_net;
use crate::rows::{self, UTC, count, stamp, time_type};

/// What a query may take.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Memory of sorts, joins and groups; beyond it they go to the disk.
    pub(crate) memory_bytes: usize,
    /// Where to: a directory in it is made and removed.
    pub(crate) spill: PathBuf,
    /// Bytes there.
    pub(crate) spill_bytes: u64,
    /// Threads.
    pub(crate) threads: usize,
}

/// Answers one query.
pub(crate) struct Engine {
    context: SessionContext,
    sql: String,
    statement: Statement,
}

/// Which tables a query reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs {
    /// `flows` or `segments`.
    pub(crate) segments: bool,
    /// `losses`.
    pub(crate) losses: bool,
}

impl Engine {
    /// Parses a query. `spill` is an empty directory for what does not fit into memory.
    ///
    /// # Errors
    /// [`Failure`] with the place, if it is none, or one that changes something.
    pub(crate) fn new(sql: &str, limits: &Limits, spill: &Path) -> Result<Self, Failure> {
        let runtime = RuntimeEnvBuilder::new()
            .with_memory_limit(limits.memory_bytes, 1.0)
            .with_temp_file_path(spill)
            .with_max_temp_directory_size(limits.spill_bytes)
            .build_arc()?;
        let config = SessionConfig::new()
            .with_information_schema(true)
            .with_target_partitions(limits.threads)
            .set_bool("datafusion.sql_parser.collect_spans", true)
            .set_bool("datafusion.execution.parquet.pushdown_filters", true)
            .set_bool(
                "datafusion.execution.parquet.schema_force_view_types",
                false,
            );
        let context = SessionContext::new_with_config_rt(config, runtime);
        context.register_udf(in_net());
        context.register_udf(community_id());
        let state = context.state();
        let dialect = state.config_options().sql_parser.dialect;
        let statement = state
            .sql_to_statement(sql, &dialect)
            .map_err(|error| explained(sql, &error))?;
        if !only_reads(&statement) {
            return Err(Failure::new(ONLY_QUERIES));
        }
        Ok(Self {
            context,
            sql: sql.to_owned(),
            statement,
        })
    }

    /// Which tables it reads.
    ///
    /// # Errors
    /// [`Failure`] if that cannot be said.
    pub(crate) fn needs(&self) -> Result<Needs, Failure> {
        if !reads_rows(&self.statement) {
            return Ok(Needs {
                segments: false,
                losses: false,
            });
        }
        let state = self.context.state();
        let tables = state.resolve_table_references(&self.statement)?;
        let has = |name: &str| tables.iter().any(|table| table.table() == name);
        Ok(Needs {
            segments: has("flows") || has("segments"),
            losses: has("losses"),
        })
    }

    /// Gives it the tables.
    ///
    /// # Errors
    /// [`Failure`] if DataFusion does not take them.
    pub(crate) fn register(
        &self,
        scope: &Scope,
        catalog: &Catalog,
        losses: RecordBatch,
    ) -> Result<(), Failure> {
        let flows = self.flows(scope, catalog)?.into_view();
        self.context.register_table("flows", flows)?;
        self.context
            .register_batch("segments", segments(&catalog.segments)?)?;
        self.context.register_batch("losses", losses)?;
        Ok(())
    }

    /// The rows of all segments that overlap the scope's time.
    fn flows(&self, scope: &Scope, catalog: &Catalog) -> Result<DataFrame, Failure> {
        let mut urls = Vec::new();
        let mut batches = Vec::new();
        for segment in &catalog.segments {
            match &segment.rows {
                RowsAt::Beside(path) => urls.push(url(path)?),
                RowsAt::Memory(rows) => batches.extend(rows.iter().cloned()),
            }
        }
        let memory = MemTable::try_new(rows::schema(), vec![batches])?;
        let mut flows = self.context.read_table(Arc::new(memory))?;
        if !urls.is_empty() {
            let format = Arc::new(ParquetFormat::default());
            let options = ListingOptions::new(format).with_file_extension(".parquet");
            let config = ListingTableConfig::new_with_multi_paths(urls)
                .with_listing_options(options)
                .with_schema(rows::schema());
            let files = ListingTable::try_new(config)?;
            flows = self.context.read_table(Arc::new(files))?.union(flows)?;
        }
        let time = |ns: u64| {
            lit(ScalarValue::TimestampNanosecond(
                Some(stamp(ns)),
                Some(UTC.into()),
            ))
        };
        if scope.from_ns > 0 {
            flows = flows.filter(col("last").gt_eq(time(scope.from_ns)))?;
        }
        if scope.to_ns < u64::MAX {
            flows = flows.filter(col("first").lt(time(scope.to_ns)))?;
        }
        // Last, and made only for a query that names it or takes all.
        let parts = ["protocol", "src", "dst", "src_port", "dst_port"].map(col);
        Ok(flows.with_column("community_id", community_id().call(parts.to_vec()))?)
    }

    /// Begins to answer.
    ///
    /// # Errors
    /// [`Failure`] with the place, if the query does not fit the tables.
    pub(crate) async fn answer(&self) -> Result<SendableRecordBatchStream, Failure> {
        let explain = |error: DataFusionError| explained(&self.sql, &error);
        let state = self.context.state();
        let plan = state
            .statement_to_plan(self.statement.clone())
            .await
            .map_err(explain)?;
        SQLOptions::new()
            .with_allow_ddl(false)
            .with_allow_dml(false)
            .with_allow_statements(false)
            .verify_plan(&plan)
            .map_err(|_| Failure::new(ONLY_QUERIES))?;
        let frame = self.context.execute_logical_plan(plan).await;
        frame
            .map_err(explain)?
            .execute_stream()
            .await
            .map_err(explain)
    }
}

/// Whether a statement changes nothing.
fn only_reads(statement: &Statement) -> bool {
    match statement {
        Statement::Statement(sql) => matches!(
            **sql,
            Sql::Query(_)
                | Sql::ExplainTable { .. }
                | Sql::ShowTables { .. }
                | Sql::ShowColumns { .. }
                | Sql::ShowFunctions { .. }
        ),
        Statement::Explain(explain) => only_reads(&explain.statement),
        _ => false,
    }
}

/// Whether it is about what is in the tables, and not about their columns, or a plan.
fn reads_rows(statement: &Statement) -> bool {
    match statement {
        Statement::Statement(sql) => matches!(**sql, Sql::Query(_)),
        Statement::Explain(explain) => explain.options.analyze,
        _ => false,
    }
}

/// What is wrong with a query, and where.
pub(crate) fn explained(sql: &str, error: &DataFusionError) -> Failure {
    let diagnostic = error.diagnostic();
    let mut text = match diagnostic {
        Some(diagnostic) => diagnostic.message.clone(),
        None => error.strip_backtrace(),
    };
    if let Some(span) = diagnostic.and_then(|diagnostic| diagnostic.span) {
        let (line, column) = (span.start.line as usize, span.start.column as usize);
        text += &format!(" at line {line}, column {column}");
        if let Some(words) = sql.lines().nth(line.saturating_sub(1)) {
            text += &format!("\n  {words}\n  {:>column$}", "^");
        }
    }
    for help in diagnostic.iter().flat_map(|diagnostic| &diagnostic.helps) {
        text += &format!("\n  {}", help.message);
    }
    Failure::new(text)
}

/// The columns of `segments`.
fn segments_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("segment", DataType::Utf8, false),
        Field::new("directory", DataType::Utf8, false),
        Field::new("first", time_type(), true),
        Field::new("last", time_type(), true),
        Field::new("packets", DataType::Int64, false),
        Field::new("bytes", DataType::Int64, false),
        Field::new("size", DataType::Int64, false),
        Field::new("open", DataType::Boolean, false),
        Field::new("damaged", DataType::Boolean, false),
        Field::new("problem", DataType::Utf8, true),
    ]))
}

fn segments(list: &[Segment]) -> Result<RecordBatch, Failure> {
    let (mut names, mut directories) = (StringBuilder::new(), StringBuilder::new());
    let mut first = TimestampNanosecondBuilder::new();
    let mut last = TimestampNanosecondBuilder::new();
    let (mut packets, mut bytes) = (Int64Builder::new(), Int64Builder::new());
    let mut sizes = Int64Builder::new();
    let (mut open, mut damaged) = (BooleanBuilder::new(), BooleanBuilder::new());
    let mut problems = StringBuilder::new();
    for segment in list {
        let name = segment.path.file_name().unwrap_or_default();
        let directory = segment.path.parent().unwrap_or(Path::new(""));
        let facts = &segment.facts;
        let some = facts.packets > 0;
        names.append_value(name.to_string_lossy());
        directories.append_value(directory.to_string_lossy());
        first.append_option(some.then_some(stamp(facts.first_ns)));
        last.append_option(some.then_some(stamp(facts.last_ns)));
        packets.append_value(count(facts.packets));
        bytes.append_value(count(facts.bytes));
        sizes.append_value(count(segment.len_bytes));
        open.append_value(segment.open);
        damaged.append_value(facts.damage.is_some());
        problems.append_option(facts.damage.as_deref());
    }
    let batch = RecordBatch::try_new(
        segments_schema(),
        vec![
            Arc::new(names.finish()),
            Arc::new(directories.finish()),
            Arc::new(first.finish().with_timezone(UTC)),
            Arc::new(last.finish().with_timezone(UTC)),
            Arc::new(packets.finish()),
            Arc::new(bytes.finish()),
            Arc::new(sizes.finish()),
            Arc::new(open.finish()),
            Arc::new(damaged.finish()),
            Arc::new(problems.finish()),
        ],
    );
    Ok(batch?)
}

/// A file as DataFusion wants it: a path would be a pattern if it had a `*` or `?`.
fn url(path: &Path) -> Result<ListingTableUrl, Failure> {
    let path = fs::canonicalize(path).map_err(|error| Failure::about(path.display(), error))?;
    let mut url = "file://".to_owned();
    for &byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b'/' | b'-' | b'.' | b'_' => url.push(char::from(byte)),
            _ if byte.is_ascii_alphanumeric() => url.push(char::from(byte)),
            _ => url += &format!("%{byte:02X}"),
        }
    }
    Ok(ListingTableUrl::parse(url)?)
}

const ONLY_QUERIES: &str =
    "only queries are answered: SELECT, WITH, VALUES, EXPLAIN, DESCRIBE and SHOW TABLES";
