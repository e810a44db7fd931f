import io.debezium.connector.jdbc.JdbcSinkConnectorTask;
import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.FileReader;
import java.io.Reader;
import java.lang.reflect.Proxy;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.connect.sink.SinkRecord;
import org.apache.kafka.connect.sink.SinkTaskContext;
import org.apache.kafka.connect.source.SourceRecord;

/** Debezium's connector for PostgreSQL, whose events go to its JDBC sink directly: without Kafka, whose time would come on top. */
public final class Pipe {
    private static Properties read(String path) throws Exception {
        Properties found = new Properties();
        try (Reader reader = new FileReader(path)) {
            found.load(reader);
        }
        return found;
    }

    /** Arguments: files with the properties of the connector and of the sink. */
    public static void main(String[] arguments) throws Exception {
        Map<String, String> settings = new HashMap<>();
        read(arguments[1]).forEach((key, value) -> settings.put((String) key, (String) value));
        JdbcSinkConnectorTask sink = new JdbcSinkConnectorTask();
        sink.initialize((SinkTaskContext) Proxy.newProxyInstance(
                Pipe.class.getClassLoader(), new Class<?>[] {SinkTaskContext.class}, (self, method, values) -> null));
        sink.start(settings);
        long[] offset = {0};
        DebeziumEngine<RecordChangeEvent<SourceRecord>> engine = DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
                .using(read(arguments[0]))
                .using((success, message, error) -> {
                    if (!success) {
                        System.err.println(message);
                        if (error != null) {
                            error.printStackTrace();
                        }
                    }
                })
                .notifying((events, committer) -> {
                    List<SinkRecord> records = new ArrayList<>(events.size());
                    for (RecordChangeEvent<SourceRecord> event : events) {
                        SourceRecord record = event.record();
                        records.add(new SinkRecord(record.topic(), 0, record.keySchema(), record.key(),
                                record.valueSchema(), record.value(), offset[0]++));
                    }
                    sink.put(records);
                    for (RecordChangeEvent<SourceRecord> event : events) {
                        committer.markProcessed(event);
                    }
                    committer.markBatchFinished();
                })
                .build();
        engine.run();
        sink.stop();
    }
}
